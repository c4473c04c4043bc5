#include "cuda/arena.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/errors.h"
#include "cuda/launch.h"
#include "cuda/timelines.h"

namespace ffi = xla::ffi;

namespace jaxmoe {
namespace {

constexpr int64_t kMemoryStep = int64_t{1} << 21;  // in which devices hand out memory

std::string bytes_text(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), bytes < (int64_t{1} << 30) ? "%.1f MiB" : "%.2f GiB",
                static_cast<double>(bytes) / (bytes < (int64_t{1} << 30) ? 1 << 20 : 1 << 30));
  return text;
}

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
         " Set XLA_PYTHON_CLIENT_MEM_FRACTION lower before jax starts (0.75 where it is not set), or lower the "
         "plan's ring_tiles: " + std::to_string(schedule.ring_tiles) + " of them take " + bytes_text(ring_bytes) + ".";
}

}  // namespace

bool Arena::holds(const Shape& shape, const Schedule& schedule, int32_t itemsize) const {
  return memory_.own != nullptr && head_.holds(needed_head(shape, schedule)) &&
         layout_of(shape, schedule, head_, itemsize).bytes <= memory_.bytes;
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

ffi::Error Arena::failure() {
  const bool seen_before = !failure_text_.empty();
  if (!seen_before && failure_record_ != nullptr &&
      std::atomic_ref(failure_record_->complete).load(std::memory_order_acquire) != 0) {
    failure_text_ = describe(failure_record_->failure, timeout_seconds_, "sm");
  }
  if (failure_text_.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                    failure_text_ +
                        (seen_before ? " That was an earlier call; the memory of its group cannot be used again."
                                     : " The output of that call is not valid.") +
                        " Restart all processes of the group. A rank that did not run the same program as the others, "
                        "or that stopped, is the usual reason.");
}

ffi::Error Arena::prepare_launches() {
  if (last_launch_ == nullptr) {
    const cudaError_t status = cudaEventCreateWithFlags(&last_launch_, cudaEventDisableTiming);
    if (status != cudaSuccess) return cuda_error("cudaEventCreate", status);
  }
  if (failure_record_ == nullptr) {
    void* record = nullptr;
    constexpr unsigned kFlags = cudaHostAllocMapped | cudaHostAllocPortable;
    const cudaError_t status = cudaHostAlloc(&record, sizeof(FailureRecord), kFlags);
    if (status != cudaSuccess) return cuda_error("host memory that the GPU can write", status);
    failure_record_ = new (record) FailureRecord{};
  }
  return ffi::Error::Success();
}

ffi::Error Arena::reserve(const Link& link, const Shape& shape, const Schedule& schedule, int32_t itemsize) {
  std::unique_lock<std::mutex> lock;
  if (ffi::Error error = claim(&lock); error.failure()) return error;
  if (ffi::Error error = failure(); error.failure()) return error;
  program_stream_ = link.stream;
  if (holds(shape, schedule, itemsize)) return reserve_timeline(schedule);
  if (ffi::Error error = prepare_launches(); error.failure()) return error;

  const HeadCapacity head = larger_head(head_, needed_head(shape, schedule));
  const ArenaLayout layout = layout_of(shape, schedule, head, itemsize);
  const int64_t body_bytes = std::max(body_bytes_, layout.bytes - layout.head_bytes);
  const int64_t bytes = ceil_div(layout.head_bytes + body_bytes, kMemoryStep) * kMemoryStep;

  // All ranks have enqueued the same launches before they come here, so those in flight end. After them this device
  // does not touch the arenas of its peers.
  if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess) {
    return cuda_error("earlier work of this device failed", status);
  }
  if (ffi::Error error = failure(); error.failure()) return error;
  head_ = {};
  body_bytes_ = 0;
  const int64_t ring_bytes = layout.rows.bytes + layout.hidden.bytes;
  if (ffi::Error error = replace_memory(link, bytes, schedule, ring_bytes); error.failure()) return error;
  head_ = head;
  body_bytes_ = body_bytes;
  return reserve_timeline(schedule);
}

// Outside of the arena: peers do not reach it.
ffi::Error Arena::reserve_timeline(const Schedule& schedule) {
  const int32_t blocks = timeline_blocks(schedule);
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

// One step of replace_memory(): this rank says whether it has succeeded, and hears whether all others have.
ffi::Error Arena::meet(const Link& link, const char* step, int64_t bytes, bool succeeded, std::vector<Note>* notes) {
  Note own{};
  own.bytes = bytes;
  own.succeeded = succeeded;
  std::string error = name_block(memory_, &own.block);
  if (error.empty()) error = exchange(link, own, notes);
  if (!error.empty()) return ffi::Error::Internal("jaxmoe: the ranks could not share their memory. " + error);
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    if ((*notes)[rank].bytes != bytes) {
      return ffi::Error::Internal("jaxmoe: rank " + std::to_string(rank_) + " wants an arena of " +
                                  std::to_string(bytes) + " bytes, rank " + std::to_string(rank) + " one of " +
                                  std::to_string((*notes)[rank].bytes) +
                                  ". All ranks have to run the same programs in the same order.");
    }
    if (!(*notes)[rank].succeeded && succeeded) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "jaxmoe: rank " + std::to_string(rank) + " could not " + step +
                            " its arena of " + bytes_text(bytes) + "; its own error says more.");
    }
  }
  return ffi::Error::Success();
}

ffi::Error Arena::replace_memory(const Link& link, int64_t bytes, const Schedule& schedule, int64_t ring_bytes) {
  const bool alone = ranks_ == 1;
  std::vector<Note> notes;
  // The old arena can go before the new one comes, once no peer reaches it any longer.
  release_peers(&memory_);
  if (!alone) {
    if (ffi::Error error = meet(link, "leave", bytes, true, &notes); error.failure()) return error;
  }
  release(&memory_);
  // Zeros before any peer can reach it: epochs and counters start from there.
  const std::string shortage = allocate(bytes, &memory_);
  ffi::Error others = ffi::Error::Success();
  if (!alone) others = meet(link, "allocate", bytes, shortage.empty(), &notes);
  if (!shortage.empty()) {
    release(&memory_);
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      no_memory_text(rank_, bytes, schedule, ring_bytes, shortage));
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
  if (!alone) others = meet(link, "share", bytes, out_of_reach.empty(), &notes);
  if (!out_of_reach.empty()) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxmoe: " + out_of_reach);
  return others;
}

template <class Params>
ffi::Error Arena::launch(Params* params, ElementType type, const Weights& weights, int32_t itemsize,
                         cudaStream_t stream) {
  std::unique_lock<std::mutex> lock;
  if (ffi::Error error = claim(&lock); error.failure()) return error;
  if (ffi::Error error = failure(); error.failure()) return error;
  if (!holds(params->shape, params->schedule, itemsize)) {
    return ffi::Error::Internal("jaxmoe: execute without an initialize that made room for it.");
  }
  params->head = head_;
  params->layout = layout_of(params->shape, params->schedule, head_, itemsize);
  params->rank = rank_;
  params->failure = failure_record_;
  params->timeline = timeline_;
  std::copy(std::begin(memory_.of_ranks), std::end(memory_.of_ranks), params->arenas);
  if (const std::string error = complete_params(params, type, weights); !error.empty()) {
    return ffi::Error::InvalidArgument(error);
  }
  timeout_seconds_ = static_cast<double>(params->timeout_ns) * 1e-9;

  // The launches of an arena have an order of their own: XLA may put two calls on two streams.
  cudaError_t status = cudaSuccess;
  if (last_stream_ != nullptr && last_stream_ != stream) status = cudaStreamWaitEvent(stream, last_launch_);
  if (status == cudaSuccess) status = launch_kernel(*params, type, stream);
  if (status == cudaSuccess) status = cudaEventRecord(last_launch_, stream);
  // The kernel takes all multiprocessors and waits for its peers. On the stream of the collectives it is in line with
  // those; but one that XLA has made synchronous runs on the program's stream. If that came up beside the kernel, it
  // could hold multiprocessors of one GPU while the kernel holds those of another, each waiting for its peer for ever.
  if (status == cudaSuccess && program_stream_ != nullptr && program_stream_ != stream) {
    status = cudaStreamWaitEvent(program_stream_, last_launch_);
  }
  last_stream_ = stream;
  launch_blocks_ = timeline_blocks(params->schedule);
  launch_backward_ = params->schedule.backward();
  ++launches_;
  return status == cudaSuccess ? ffi::Error::Success() : cuda_error("the kernel could not be launched", status);
}

template ffi::Error Arena::launch(ForwardParams*, ElementType, const Weights&, int32_t, cudaStream_t);
template ffi::Error Arena::launch(BackwardParams*, ElementType, const Weights&, int32_t, cudaStream_t);

ffi::ErrorOr<std::optional<LaunchTimeline>> Arena::timeline() {
  std::unique_lock<std::mutex> lock;
  if (ffi::Error error = claim(&lock); error.failure()) return ffi::Unexpected(error);
  if (launch_blocks_ == 0) return std::optional<LaunchTimeline>();
  const int32_t blocks = launch_blocks_;
  std::vector<std::byte> bytes(timeline_bytes(blocks));
  int previous = 0;
  cudaGetDevice(&previous);
  cudaError_t status = cudaSetDevice(device_);
  if (status == cudaSuccess) status = cudaEventSynchronize(last_launch_);
  if (status == cudaSuccess) status = cudaMemcpy(bytes.data(), timeline_, bytes.size(), cudaMemcpyDeviceToHost);
  cudaSetDevice(previous);
  if (status != cudaSuccess) return ffi::Unexpected(cuda_error("the timeline could not be read", status));
  if (ffi::Error error = failure(); error.failure()) return ffi::Unexpected(error);
  LaunchTimeline result = decode_timeline(bytes.data(), blocks);
  result.device = device_;
  result.ranks = ranks_;
  result.rank = rank_;
  result.launch = launches_;
  result.backward = launch_backward_;
  return std::optional(std::move(result));
}

namespace {

// GPUs of a group by UUID, in the order of their ranks.
using Members = std::vector<std::vector<unsigned char>>;

struct Table {
  std::mutex mutex;
  std::map<std::pair<int32_t, Members>, std::unique_ptr<Arena>> arenas;

  static Table& get() {
    static Table* table = new Table;  // never destroyed: handlers may still run while the process ends
    return *table;
  }
};

Arena* arena_of(int32_t device, const Members& members, int32_t ranks, int32_t rank) {
  Table& table = Table::get();
  const std::lock_guard lock(table.mutex);
  std::unique_ptr<Arena>& arena = table.arenas[{device, members}];
  if (arena == nullptr) arena = std::make_unique<Arena>(device, ranks, rank);
  return arena.get();
}

ffi::Error check_membership(const Membership& found, int32_t device, int32_t ranks) {
  if (found.ranks == ranks && found.rank >= 0 && found.rank < ranks && found.device == device) {
    return ffi::Error::Success();
  }
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jaxmoe: XLA's communicator has " + std::to_string(found.ranks) + " ranks and is rank " +
                        std::to_string(found.rank) + " on device " + std::to_string(found.device) +
                        "; this call has " + std::to_string(ranks) + " ranks and runs on device " +
                        std::to_string(device) + ".");
}

}  // namespace

std::vector<LaunchTimeline> arena_timelines() {
  std::vector<Arena*> arenas;
  {
    Table& table = Table::get();
    const std::lock_guard lock(table.mutex);
    for (const auto& [key, arena] : table.arenas) arenas.push_back(arena.get());
  }
  std::vector<LaunchTimeline> launches;
  for (Arena* arena : arenas) {
    ffi::ErrorOr<std::optional<LaunchTimeline>> read = arena->timeline();
    if (read.has_error()) throw std::runtime_error(read.error().message());
    if (*read) launches.push_back(std::move(**read));
  }
  return launches;
}

ffi::ErrorOr<Arena*> find_arena(int32_t device, const Link& link) {
  if (link.ranks == 1) return arena_of(device, {}, 1, 0);

  Membership found{};
  if (const std::string error = membership(link, &found); !error.empty()) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxmoe: " + error));
  }
  if (ffi::Error error = check_membership(found, device, link.ranks); error.failure()) return ffi::Unexpected(error);
  // Not beside a kernel that waits for peers: what follows allocates and may load a kernel of NCCL's.
  cudaDeviceProp properties{};
  cudaError_t status = cudaDeviceSynchronize();
  if (status == cudaSuccess) status = cudaGetDeviceProperties(&properties, device);
  if (status != cudaSuccess) return ffi::Unexpected(cuda_error("earlier work of this device failed", status));
  Note own{};
  static_assert(sizeof(own.gpu) == sizeof(properties.uuid));
  std::memcpy(own.gpu, &properties.uuid, sizeof(own.gpu));
  std::vector<Note> notes;
  if (const std::string error = exchange(link, own, &notes); !error.empty()) {
    return ffi::Unexpected(
        ffi::Error::Internal("jaxmoe: the ranks could not tell each other who they are. " + error));
  }
  Members members;
  for (const Note& note : notes) members.emplace_back(std::begin(note.gpu), std::end(note.gpu));
  return arena_of(device, members, link.ranks, found.rank);
}

}  // namespace jaxmoe
