// A GPU as all arenas of this process on it share it: one order of launches, one way to tell the hosts of other ranks
// something, and whether layers can run on it at all. Caller: cuda/host/arena.cu. Everything here works on the current
// device.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/host/notes.h"
#include "cuda/host/progress.h"

namespace jaxmoe {

class Gpu {
 public:
  // That of the device with this number, as the CUDA runtime counts.
  static Gpu& of(int32_t device);
  // What has been said by condemn(), of all GPUs of this process.
  static std::vector<std::string> condemned();
  // Of all GPUs of this process (cuda/host/progress.h).
  static std::vector<LaunchProgress> progress();

  explicit Gpu(int32_t device) : device_(device), progress_{device, 0, 0, 0} {}
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Why no layer runs on this GPU again; empty where they do. Then nothing is enqueued, waited for or freed on it
  // either: a collective may be on it that never ends, and whatever waits for the GPU would wait for that.
  std::string failure();

  // Makes events. Returns what went wrong, empty where nothing did.
  std::string prepare();

  // Enqueues a launch on `stream`, after all launches of layers on this GPU whatever arena and stream they were on:
  // XLA has more than one stream for what communicates, and kernels that wait for peers must come in one order on all
  // GPUs. What the program enqueues on its own stream, `program`, comes after it.
  cudaError_t launch(cudaStream_t stream, cudaStream_t program, const std::function<cudaError_t()>& enqueue);

  // Waits until all launches of layers on this GPU and all that has been enqueued on the stream of `link` have ended.
  // Returns what went wrong, empty where nothing did.
  std::string await_earlier_work(const Link& link);

  // As the function of that name (cuda/host/notes.h). Where it fails the GPU is condemned.
  std::string exchange(const Link& link, const Note& own, std::vector<Note>* notes);

  // Waits for the last launch, which has a limit of its own.
  cudaError_t await_last_launch();

 private:
  void count_launch(cudaStream_t stream);
  bool is_waiting();  // progress_mutex_ is held
  std::string condemn(const std::string& reason);

  const int32_t device_;
  std::mutex failure_mutex_;
  std::string failure_;
  std::mutex launches_mutex_;
  cudaEvent_t last_launch_ = nullptr;
  // Not launches_mutex_, which a thread may hold that waits for room in a stream.
  std::mutex progress_mutex_;
  cudaEvent_t watched_launch_ = nullptr;
  LaunchProgress progress_;
  std::chrono::steady_clock::time_point watched_since_;
  Board board_;  // of the thread that exchanges; a device has one at a time
};

}  // namespace jaxmoe
