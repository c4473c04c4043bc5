// A GPU as all arenas of this process on it share it: one order of launches, one way to tell the hosts of other ranks
// something, and whether layers can run on it at all. Caller: cuda/host/arena.cc. Everything here works on the current
// device.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
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

  // Enqueues a launch beside the program: on a stream of this GPU's own, after all that has been enqueued on `program`
  // and after all other launches. Nothing of the program waits for it but finish(). `arrays` are those of the program's
  // that it reads and writes, the first one among those that it writes.
  cudaError_t start(cudaStream_t program, const std::vector<const void*>& arrays,
                    const std::function<cudaError_t(cudaStream_t)>& enqueue);

  // What is enqueued on `program` from here on comes after the launch that was started with these arrays; there may be
  // more. Returns what is wrong, empty where nothing is.
  std::string finish(cudaStream_t program, const std::vector<const void*>& arrays);

  // Waits until all launches of layers on this GPU and all that has been enqueued on the stream of `link` have ended,
  // however long that takes: nothing is wrong with a program that computes for hours, and launches have limits of their
  // own. Returns what went wrong, empty where nothing did.
  std::string await_earlier_work(const Link& link);

  // As the function of that name (cuda/host/notes.h). Where it fails the GPU is condemned.
  std::string exchange(const Link& link, const Note& own, std::vector<Note>* notes);

  // Waits for the last launch, which has a limit of its own.
  cudaError_t await_last_launch();

 private:
  // A launch that nobody has waited for yet.
  struct Started {
    std::vector<const void*> arrays;
    cudaEvent_t done;
  };
  // More than any program has at a time. Those of programs that have failed in between stay, the oldest go.
  static constexpr std::size_t kMostStarted = 64;

  void count_launch(cudaStream_t stream);
  cudaError_t event_of_started(const void* first, cudaEvent_t* event);  // launches_mutex_ is held
  bool is_waiting();  // progress_mutex_ is held
  std::string condemn(const std::string& reason);

  const int32_t device_;
  std::mutex failure_mutex_;
  std::string failure_;
  std::mutex launches_mutex_;
  cudaEvent_t last_launch_ = nullptr;
  cudaStream_t beside_ = nullptr;   // of the launches that are started, made with the first one
  cudaEvent_t program_ = nullptr;   // between the two streams
  std::deque<Started> started_;     // in their order
  std::vector<cudaEvent_t> events_; // that nobody uses
  // Not launches_mutex_, which a thread may hold that waits for room in a stream.
  std::mutex progress_mutex_;
  cudaEvent_t watched_launch_ = nullptr;
  CUcontext context_ = nullptr;  // of this GPU, for threads that have another one or none
  LaunchProgress progress_;
  std::chrono::steady_clock::time_point watched_since_;
  Board board_;  // of the thread that exchanges; a device has one at a time
};

}  // namespace jaxmoe
