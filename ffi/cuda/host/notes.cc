#include "cuda/host/notes.h"

#include <cstdio>
#include <type_traits>

#include "cuda/host/errors.h"
#include "cuda/host/nccl.h"

namespace jaxmoe {
namespace {

constexpr int32_t kMostNotes = kMaxPeers + 1;

std::string make(Board* board) {
  void* memory = nullptr;
  cudaError_t status = cudaSuccess;
  if (board->on_gpu == nullptr) {
    status = cudaMalloc(&memory, sizeof(Note) * kMostNotes);
    if (status != cudaSuccess) return cuda_text("cudaMalloc of the notes that ranks exchange", status);
    board->on_gpu = static_cast<Note*>(memory);
  }
  if (board->on_host == nullptr) {
    status = cudaHostAlloc(&memory, sizeof(Note) * kMostNotes, cudaHostAllocDefault);
    if (status != cudaSuccess) return cuda_text("cudaHostAlloc of the notes that ranks exchange", status);
    board->on_host = static_cast<Note*>(memory);
  }
  if (board->gathered == nullptr) status = cudaEventCreateWithFlags(&board->gathered, cudaEventDisableTiming);
  return status == cudaSuccess ? "" : cuda_text("cudaEventCreate", status);
}

Clock::time_point deadline_of(const Link& link) {
  const std::chrono::duration<double> limit(link.timeout_seconds);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
}

std::string too_late(const Link& link) {
  char text[128];
  std::snprintf(text, sizeof(text), "Not all ranks came within %g s (JAXMOE_TIMEOUT_SECONDS).", link.timeout_seconds);
  return text;
}

// Enqueues the collective; the communicator may be of the kind that does not block.
std::string gather(const Nccl& nccl, const Board& board, const Link& link, Clock::time_point deadline) {
  Nccl::Result result = nccl.all_gather(board.on_gpu, board.on_gpu + 1, sizeof(Note), Nccl::kBytes, link.communicator,
                                        link.stream);
  const bool enqueued = wait_until(deadline, [&] {
    return result == Nccl::kInProgress && nccl.async_error(link.communicator, &result) == Nccl::kSuccess &&
           result == Nccl::kInProgress;
  });
  if (!enqueued) return too_late(link);
  return result == Nccl::kSuccess ? "" : std::string("ncclAllGather: ") + nccl.error_text(result) + ".";
}

}  // namespace

std::string membership(const Link& link, Membership* found) {
  const Nccl* nccl = nullptr;
  if (const std::string missing = find_nccl(&nccl); !missing.empty()) return missing;
  Nccl::Result result = nccl->count(link.communicator, &found->ranks);
  if (result == Nccl::kSuccess) result = nccl->rank(link.communicator, &found->rank);
  if (result == Nccl::kSuccess) result = nccl->device(link.communicator, &found->device);
  if (result == Nccl::kSuccess) return "";
  return std::string("XLA's communicator cannot be asked for its ranks: ") + nccl->error_text(result) + ".";
}

std::string exchange(Board* board, const Link& link, const Note& own, std::vector<Note>* notes) {
  static_assert(std::is_trivially_copyable_v<Note>);
  const Nccl* nccl = nullptr;
  if (const std::string missing = find_nccl(&nccl); !missing.empty()) return missing;
  if (const std::string error = make(board); !error.empty()) return error;
  const Clock::time_point deadline = deadline_of(link);
  board->on_host[0] = own;
  const std::size_t bytes = sizeof(Note) * link.ranks;
  cudaError_t status =
      cudaMemcpyAsync(board->on_gpu, board->on_host, sizeof(own), cudaMemcpyHostToDevice, link.stream);
  if (status != cudaSuccess) return cuda_text("cudaMemcpyAsync", status);
  if (const std::string error = gather(*nccl, *board, link, deadline); !error.empty()) return error;
  status = cudaMemcpyAsync(board->on_host + 1, board->on_gpu + 1, bytes, cudaMemcpyDeviceToHost, link.stream);
  if (status == cudaSuccess) status = cudaEventRecord(board->gathered, link.stream);
  if (status != cudaSuccess) return cuda_text("cudaMemcpyAsync", status);
  const auto is_on_its_way = [&] { return (status = cudaEventQuery(board->gathered)) == cudaErrorNotReady; };
  if (!wait_until(deadline, is_on_its_way)) return too_late(link);
  if (status != cudaSuccess) return cuda_text("ncclAllGather", status);
  notes->assign(board->on_host + 1, board->on_host + 1 + link.ranks);
  return "";
}

}  // namespace jaxmoe
