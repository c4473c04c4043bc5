#include "cuda/host/arena.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <new>
#include <utility>

#include "cuda/host/errors.h"

namespace ffi = xla::ffi;

namespace jaxmoe {
namespace {

constexpr int64_t kMemoryStep = int64_t{1} << 21;  // in which devices hand out memory

// Small changes of shape find room.
int64_t rounded(int64_t count) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count))); }

HeadCapacity larger_head(const HeadCapacity& present, const HeadCapacity& needed) {
  return {.ranks = needed.ranks,
          .local_experts = std::max(present.local_experts, needed.local_experts),
          .row_tiles = std::max(present.row_tiles, rounded(needed.row_tiles)),
          .slots = std::max(present.slots, rounded(needed.slots))};
}

// What to do about memory that is not there. XLA's pool takes its share when JAX starts, used or not.
std::string no_memory_text(int32_t rank, int64_t bytes, const Schedule& schedule, int64_t ring_bytes,
                           const std::string& reason) {
  std::size_t free = 0, all = 0;
  cudaMemGetInfo(&free, &all);
  return "jaxmoe: rank " + std::to_string(rank) + " needs " + bytes_text(bytes) +
         " of GPU memory outside of XLA's pool, " + bytes_text(static_cast<int64_t>(free)) + " of " +
         bytes_text(static_cast<int64_t>(all)) + " are free: " + reason +
         " Set XLA_PYTHON_CLIENT_MEM_FRACTION lower before jax starts (0.75 where it is not set), or " +
         (schedule.exchanges() ? "dispatch fewer tokens at a time."
                               : "lower the plan's ring_tiles: " + std::to_string(schedule.ring_tiles) +
                                     " of them take " + bytes_text(ring_bytes) + ".");
}

}  // namespace

bool Arena::holds(const LaunchSizes& sizes) {
  const std::lock_guard lock(state_mutex_);
  return bytes_ > 0 && head_.holds(needed_head(sizes.shape, sizes.schedule)) &&
         layout_of(sizes.shape, sizes.schedule, sizes.formats, head_).bytes <= bytes_;
}

void Arena::offer(const HeadCapacity& head, int64_t bytes) {
  const std::lock_guard lock(state_mutex_);
  head_ = head;
  bytes_ = bytes;
}

ffi::Error Arena::claim(std::unique_lock<std::mutex>* lock) {
  *lock = std::unique_lock(claimed_, std::try_to_lock);
  if (lock->owns_lock()) return ffi::Error::Success();
  if (ranks_ == 1) {  // whoever has it waits for this device alone
    lock->lock();
    return ffi::Error::Success();
  }
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jaxmoe: two threads of this process run programs with experts over " +
                        std::to_string(ranks_) + " ranks on device " + std::to_string(device_) +
                        " at the same time; the other ranks could run them in another order and wait for ever. Run "
                        "them from one thread.");
}

std::string Arena::failure() {
  const std::lock_guard lock(state_mutex_);
  if (!failure_.empty() || report_ == nullptr) return failure_;
  const int32_t place = std::atomic_ref(report_->place).load(std::memory_order_acquire);
  if (std::atomic_ref(report_->failure.complete).load(std::memory_order_acquire) != 0) {
    failure_ = describe(report_->failure.failure, timeout_seconds_, "sm");
  } else if (place != kNoPlace && place != rank_) {
    failure_ = "jaxmoe: rank " + std::to_string(rank_) + " of XLA's communicator is number " + std::to_string(place) +
               " of its group in the mesh, so ranks have taken each other's experts for their own.";
  }
  return failure_;
}

// Before anything is enqueued, waited for or freed.
ffi::Error Arena::usable() {
  const std::string text = gpu_.failure();
  return text.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kFailedPrecondition, text + kRestart);
}

ffi::Error Arena::prepare_launches() {
  if (const std::string error = gpu_.prepare(); !error.empty()) return ffi::Error::Internal("jaxmoe: " + error);
  if (report_ != nullptr) return ffi::Error::Success();
  void* report = nullptr;
  constexpr unsigned kFlags = cudaHostAllocMapped | cudaHostAllocPortable;
  // Without the lock, which failure() takes: it may wait for the GPU.
  const cudaError_t status = cudaHostAlloc(&report, sizeof(Report), kFlags);
  if (status != cudaSuccess) return cuda_error("host memory that the GPU can write", status);
  const std::lock_guard lock(state_mutex_);
  report_ = new (report) Report{};
  return ffi::Error::Success();
}

ffi::Error Arena::reserve(const Link& link, const LaunchSizes& sizes) {
  if (const int32_t ranks = sizes.shape.ranks; link.ranks != ranks_ || ranks != ranks_) {  // what others say is read by rank
    return ffi::Error::Internal("jaxmoe: an arena of " + std::to_string(ranks_) + " ranks was found for a call of " +
                                std::to_string(ranks) + " in a group of " + std::to_string(link.ranks) + ".");
  }
  std::unique_lock<std::mutex> lock;
  if (ffi::Error error = claim(&lock); error.failure()) return error;
  if (ffi::Error error = usable(); error.failure()) return error;
  program_stream_ = link.stream;
  return shortage_ = make_room(link, sizes);
}

ffi::Error Arena::make_room(const Link& link, const LaunchSizes& sizes) {
  const auto& [shape, schedule, formats, pass] = sizes;
  if (holds(sizes)) return reserve_timeline(sizes);
  if (ffi::Error error = prepare_launches(); error.failure()) return error;

  const HeadCapacity head = larger_head(head_, needed_head(shape, schedule));
  const ArenaLayout layout = layout_of(shape, schedule, formats, head);
  const int64_t body_bytes = std::max(body_bytes_, layout.bytes - layout.head_bytes);
  const int64_t bytes = ceil_div(layout.head_bytes + body_bytes, kMemoryStep) * kMemoryStep;

  // All ranks have enqueued the same launches before they come here, so those in flight end. After them this device
  // does not touch the arenas of its peers.
  if (const std::string error = gpu_.await_earlier_work(link); !error.empty()) {
    return ffi::Error::Internal("jaxmoe: " + error);
  }
  if (const std::string text = failure(); !text.empty()) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text + kRestart);
  }
  offer({}, 0);
  body_bytes_ = 0;
  const int64_t ring_bytes = layout.rows.bytes + layout.h.bytes;
  const WantedArena wanted{rank_, bytes, agreement_of(shape, schedule, formats, head)};
  if (ffi::Error error = replace_memory(link, wanted, schedule, ring_bytes); error.failure()) return error;
  offer(head, memory_.bytes);
  body_bytes_ = body_bytes;
  return reserve_timeline(sizes);
}

// Outside of the arena: peers do not reach it.
ffi::Error Arena::reserve_timeline(const LaunchSizes& sizes) {
  const int32_t blocks = timeline_blocks(sizes);
  if (blocks <= timeline_blocks_) return ffi::Error::Success();
  cudaError_t status = cudaFree(timeline_);
  timeline_ = nullptr;
  timeline_blocks_ = launch_blocks_ = 0;
  void* memory = nullptr;
  if (status == cudaSuccess) status = cudaMalloc(&memory, timeline_bytes(blocks));
  if (status != cudaSuccess) return cuda_error("a timeline of " + bytes_text(timeline_bytes(blocks)), status);
  timeline_ = static_cast<std::byte*>(memory);
  timeline_blocks_ = blocks;
  return ffi::Error::Success();
}

// Returns early only where the GPU is not to be touched again, or where all ranks do.
ffi::Error Arena::replace_memory(const Link& link, const WantedArena& wanted, const Schedule& schedule,
                                 int64_t ring_bytes) {
  const bool alone = ranks_ == 1;
  std::vector<Note> notes;
  // The old arena can go before the new one comes, once no peer reaches it any longer.
  release_peers(&memory_);
  if (!alone) {
    if (ffi::Error error = meet(gpu_, link, wanted, memory_, "leave", true, &notes); error.failure()) return error;
  }
  release(&memory_);
  // Zeros before any peer can reach it: launch numbers and counters start from there.
  const std::string shortage = allocate(wanted.bytes, link.stream, &memory_);
  ffi::Error others = ffi::Error::Success();
  if (!alone) others = meet(gpu_, link, wanted, memory_, "allocate", shortage.empty(), &notes);
  if (!shortage.empty()) {
    if (gpu_.failure().empty()) release(&memory_);
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      no_memory_text(rank_, wanted.bytes, schedule, ring_bytes, shortage));
  }
  if (others.failure()) return others;
  std::string out_of_reach;
  for (int32_t rank = 0; rank < ranks_ && out_of_reach.empty(); ++rank) {
    if (rank == rank_) {
      memory_.of_ranks[rank] = memory_.own;
    } else {
      out_of_reach = reach_peer(rank, notes[rank].block, &memory_);
    }
  }
  if (!alone) others = meet(gpu_, link, wanted, memory_, "share", out_of_reach.empty(), &notes);
  if (!out_of_reach.empty()) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxmoe: " + out_of_reach);
  return others;
}

ffi::Error Arena::launch(const ArenaCall& call) {
  // Another thread has it while it launches, or until its ranks have met.
  const std::lock_guard lock(claimed_);
  if (ffi::Error error = usable(); error.failure()) return error;
  if (!holds(call.sizes)) {
    // A larger call of the same program found no memory after this one had its own, and is executed later.
    if (shortage_.failure()) return shortage_;
    return ffi::Error::Internal("jaxmoe: execute without an initialize that made room for it.");
  }
  const auto& [shape, schedule, formats, pass] = call.sizes;
  RankParams rank{.shape = shape,
                  .schedule = schedule,
                  .head = head_,
                  .layout = layout_of(shape, schedule, formats, head_),
                  .activation = call.activation,
                  .power_of_two_scales = call.power_of_two_scales,
                  .rank = rank_,
                  .timeout_ns = static_cast<uint64_t>(call.timeout_seconds * 1e9),
                  .failure = &report_->failure,
                  .arenas = {}};
  std::copy(std::begin(memory_.of_ranks), std::end(memory_.of_ranks), rank.arenas);
  ReadyLaunch ready{};
  if (const std::string error = make_launch(rank, pass, formats, call.arrays, timeline_, &ready); !error.empty()) {
    return ffi::Error::InvalidArgument(error);
  }
  {
    const std::lock_guard state(state_mutex_);
    timeout_seconds_ = call.timeout_seconds;
  }
  const auto enqueue_on = [&](cudaStream_t stream) {
    const cudaError_t launched = enqueue(ready, stream);
    if (launched != cudaSuccess || call.place == nullptr) return launched;
    // On the program's stream in any case: nobody keeps the place for a call that runs beside it.
    return cudaMemcpyAsync(&report_->place, call.place, sizeof(*call.place), cudaMemcpyDeviceToHost, call.stream);
  };
  // The program's own kernels come after this one, whatever stream XLA has put it on, or do not wait for it.
  cudaError_t status = call.beside.empty()
                           ? gpu_.launch(call.stream, program_stream_, [&] { return enqueue_on(call.stream); })
                           : gpu_.start(call.stream, call.beside, enqueue_on);
  launch_blocks_ = timeline_blocks(call.sizes);
  launch_backward_ = schedule.backward();
  ++launches_;
  return status == cudaSuccess ? ffi::Error::Success() : cuda_error("the kernel could not be launched", status);
}

ffi::ErrorOr<std::optional<LaunchTimeline>> Arena::timeline() {
  std::unique_lock<std::mutex> lock;
  if (ffi::Error error = claim(&lock); error.failure()) return ffi::Unexpected(error);
  if (ffi::Error error = usable(); error.failure()) return ffi::Unexpected(error);
  if (launch_blocks_ == 0) return std::optional<LaunchTimeline>();
  const int32_t blocks = launch_blocks_;
  std::vector<std::byte> bytes(timeline_bytes(blocks));
  int previous = 0;
  cudaGetDevice(&previous);
  cudaError_t status = cudaSetDevice(device_);
  if (status == cudaSuccess) status = gpu_.await_last_launch();
  if (status == cudaSuccess) status = cudaMemcpy(bytes.data(), timeline_, bytes.size(), cudaMemcpyDeviceToHost);
  cudaSetDevice(previous);
  if (status != cudaSuccess) return ffi::Unexpected(cuda_error("the timeline could not be read", status));
  if (const std::string text = failure(); !text.empty()) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text + kRestart));
  }
  LaunchTimeline result = decode_timeline(bytes.data(), blocks);
  result.device = device_;
  result.ranks = ranks_;
  result.rank = rank_;
  result.launch = launches_;
  result.backward = launch_backward_;
  return std::optional(std::move(result));
}

}  // namespace jaxmoe
