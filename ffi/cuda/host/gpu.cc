#include "cuda/host/gpu.h"

#include <algorithm>
#include <map>
#include <memory>

#include "cuda/host/driver.h"
#include "cuda/host/errors.h"

namespace jaxmoe {
namespace {

// Less than any limit of those who wait for them (kMarginSeconds of handler.h).
constexpr std::chrono::milliseconds kBetweenSigns{200};

struct Gpus {
  std::mutex mutex;
  std::map<int32_t, std::unique_ptr<Gpu>> by_device;

  static Gpus& get() {
    static Gpus* gpus = new Gpus;  // never destroyed: handlers may still run while the process ends
    return *gpus;
  }

  // For what takes locks of each: nobody who looks for a GPU waits meanwhile.
  std::vector<Gpu*> all() {
    const std::lock_guard lock(mutex);
    std::vector<Gpu*> found;
    for (const auto& [device, gpu] : by_device) found.push_back(gpu.get());
    return found;
  }
};

}  // namespace

Gpu& Gpu::of(int32_t device) {
  Gpus& gpus = Gpus::get();
  const std::lock_guard lock(gpus.mutex);
  std::unique_ptr<Gpu>& gpu = gpus.by_device[device];
  if (gpu == nullptr) gpu = std::make_unique<Gpu>(device);
  return *gpu;
}

std::vector<std::string> Gpu::condemned() {
  std::vector<std::string> all;
  for (Gpu* gpu : Gpus::get().all()) {
    if (std::string text = gpu->failure(); !text.empty()) all.push_back(std::move(text));
  }
  return all;
}

std::vector<LaunchProgress> launch_progress() { return Gpu::progress(); }

std::string Gpu::failure() {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

std::string Gpu::condemn(const std::string& reason) {
  const std::lock_guard lock(failure_mutex_);
  if (failure_.empty()) failure_ = "jaxmoe: GPU " + std::to_string(device_) + " of this process: " + reason;
  return reason;
}

std::string Gpu::prepare() {
  const std::lock_guard lock(launches_mutex_);
  if (last_launch_ != nullptr) return "";
  // This binds the context of the current device to the thread.
  cudaError_t status = cudaEventCreateWithFlags(&watched_launch_, cudaEventDisableTiming);
  if (status == cudaSuccess) {
    const auto current = driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent", &status);
    if (current == nullptr || current(&context_) != CUDA_SUCCESS) return cuda_text("cuCtxGetCurrent", status);
  }
  if (status == cudaSuccess) status = cudaEventCreateWithFlags(&last_launch_, cudaEventDisableTiming);
  return status == cudaSuccess ? "" : cuda_text("cudaEventCreate", status);
}

cudaError_t Gpu::launch(cudaStream_t stream, cudaStream_t program, const std::function<cudaError_t()>& enqueue) {
  const std::lock_guard lock(launches_mutex_);
  // Always, whichever stream the last one was on: a stream that has gone may come back with the same handle.
  cudaError_t status = cudaStreamWaitEvent(stream, last_launch_);
  if (status == cudaSuccess) status = enqueue();
  if (status == cudaSuccess) status = cudaEventRecord(last_launch_, stream);
  if (status == cudaSuccess) status = cudaStreamWaitEvent(program, last_launch_);
  if (status == cudaSuccess) count_launch(stream);
  return status;
}

// Of another launch that wrote the same array nobody has waited, nor will: the program has given that array away.
cudaError_t Gpu::event_of_started(const void* first, cudaEvent_t* event) {
  const auto forget = [&](auto launch) {
    events_.push_back(launch->done);
    started_.erase(launch);
  };
  const auto same = std::ranges::find_if(started_, [&](const Started& each) { return each.arrays.front() == first; });
  if (same != started_.end()) forget(same);
  if (started_.size() == kMostStarted) forget(started_.begin());
  if (events_.empty()) return cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  *event = events_.back();
  events_.pop_back();
  return cudaSuccess;
}

cudaError_t Gpu::start(cudaStream_t program, const std::vector<const void*>& arrays,
                       const std::function<cudaError_t(cudaStream_t)>& enqueue) {
  const std::lock_guard lock(launches_mutex_);
  cudaError_t status = cudaSuccess;
  if (beside_ == nullptr) {
    // Blocks of a stream of higher priority get the multiprocessors that become free first.
    int least = 0, greatest = 0;
    status = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (status == cudaSuccess) status = cudaEventCreateWithFlags(&program_, cudaEventDisableTiming);
    if (status == cudaSuccess) status = cudaStreamCreateWithPriority(&beside_, cudaStreamNonBlocking, greatest);
  }
  Started started{arrays, nullptr};
  if (status == cudaSuccess) status = event_of_started(arrays.front(), &started.done);
  if (status == cudaSuccess) status = cudaEventRecord(program_, program);
  if (status == cudaSuccess) status = cudaStreamWaitEvent(beside_, program_);
  if (status == cudaSuccess) status = cudaStreamWaitEvent(beside_, last_launch_);
  // The program goes on when this launch can begin: else what follows, a product on all multiprocessors until it ends,
  // would have taken them by then.
  if (status == cudaSuccess) status = cudaEventRecord(program_, beside_);
  if (status == cudaSuccess) status = cudaStreamWaitEvent(program, program_);
  if (status == cudaSuccess) status = enqueue(beside_);
  if (status == cudaSuccess) status = cudaEventRecord(last_launch_, beside_);
  if (status == cudaSuccess) status = cudaEventRecord(started.done, beside_);
  if (status != cudaSuccess) return status;
  count_launch(beside_);
  started_.push_back(std::move(started));
  return cudaSuccess;
}

std::string Gpu::finish(cudaStream_t program, const std::vector<const void*>& arrays) {
  const std::lock_guard lock(launches_mutex_);
  const auto has = [&](const void* array) { return std::ranges::find(arrays, array) != arrays.end(); };
  const auto launch =
      std::ranges::find_if(started_, [&](const Started& each) { return std::ranges::all_of(each.arrays, has); });
  if (launch == started_.end()) {
    return "jaxmoe: a dispatch or a combine is finished whose arrays are not where they were when it was started: XLA "
           "has copied one of them meanwhile. Start and finish it in the same jax.jit, and in the same turn of a loop.";
  }
  const cudaError_t status = cudaStreamWaitEvent(program, launch->done);
  events_.push_back(launch->done);
  started_.erase(launch);
  return status == cudaSuccess ? "" : cuda_text("cudaStreamWaitEvent", status);
}

// One launch is watched at a time: the next one that is enqueued after it has ended.
void Gpu::count_launch(cudaStream_t stream) {
  {
    const std::lock_guard lock(progress_mutex_);
    ++progress_.enqueued;
    if (is_waiting()) return;
  }
  // Without the lock: it waits where the stream has no room. No other launch is counted meanwhile, and while none is
  // watched nobody looks at the event.
  if (cudaEventRecord(watched_launch_, stream) != cudaSuccess) return;
  const std::lock_guard lock(progress_mutex_);
  progress_.waiting = progress_.enqueued;
  watched_since_ = std::chrono::steady_clock::now();
}

bool Gpu::is_waiting() {
  if (progress_.waiting != 0 && cudaEventQuery(watched_launch_) != cudaErrorNotReady) progress_.waiting = 0;
  return progress_.waiting != 0;
}

std::vector<LaunchProgress> Gpu::progress() {
  std::vector<LaunchProgress> all;
  for (Gpu* gpu : Gpus::get().all()) {
    const std::lock_guard lock(gpu->progress_mutex_);
    if (gpu->progress_.waiting != 0) {
      const CurrentContext current(gpu->context_);
      gpu->is_waiting();
    }
    LaunchProgress found = gpu->progress_;
    if (found.waiting != 0) {
      const std::chrono::duration<double> since = std::chrono::steady_clock::now() - gpu->watched_since_;
      found.waiting_seconds = since.count();
    }
    all.push_back(found);
  }
  return all;
}

std::string Gpu::await_earlier_work(const Link& link) {
  cudaError_t status = cudaSuccess;
  const auto is_at_work = [&] {
    status = cudaEventQuery(last_launch_);
    if (status == cudaSuccess) status = cudaStreamQuery(link.stream);
    return status == cudaErrorNotReady;
  };
  while (!wait_until(Clock::now() + kBetweenSigns, is_at_work)) {
    // A collective that never ends may be what is waited for.
    if (!failure().empty()) return "another call has failed on this GPU meanwhile.";
    link.goes_on();
  }
  return status == cudaSuccess ? "" : cuda_text("earlier work of this device failed", status);
}

std::string Gpu::exchange(const Link& link, const Note& own, std::vector<Note>* notes) {
  link.goes_on();
  const std::string error = jaxmoe::exchange(&board_, link, own, notes);
  return error.empty() ? "" : condemn(error);
}

cudaError_t Gpu::await_last_launch() { return cudaEventSynchronize(last_launch_); }

}  // namespace jaxmoe
