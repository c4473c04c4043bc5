#include "cuda/exchange.h"

#include <chrono>
#include <cstdio>
#include <thread>
#include <type_traits>

#include "cuda/errors.h"
#include "cuda/nccl.h"

namespace jaxmoe {
namespace {

using Clock = std::chrono::steady_clock;

// Asks `is_pending` until it says no; false when the time is over.
template <class IsPending>
bool wait_until(Clock::time_point deadline, IsPending is_pending) {
  while (is_pending()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

std::string too_late(double seconds) {
  char text[256];
  std::snprintf(text, sizeof(text),
                "Not all ranks came within %g s (JAXMOE_TIMEOUT_SECONDS). All ranks have to run the same programs in "
                "the same order; one that stopped before is the usual reason.",
                seconds);
  return text;
}

// All notes lie in `board` on return: the own one, then those of all ranks.
std::string gather(const Nccl& nccl, const Link& link, std::byte* board) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(link.timeout_seconds));
  Nccl::Result result = nccl.all_gather(board, board + sizeof(Note), sizeof(Note), Nccl::kBytes, link.communicator,
                                        link.stream);
  // Communicators may be of the kind that does not block.
  const bool enqueued = wait_until(deadline, [&] {
    return result == Nccl::kInProgress && nccl.async_error(link.communicator, &result) == Nccl::kSuccess &&
           result == Nccl::kInProgress;
  });
  if (enqueued && result != Nccl::kSuccess) return std::string("ncclAllGather: ") + nccl.error_text(result) + ".";
  cudaError_t status = cudaSuccess;
  if (!enqueued ||
      !wait_until(deadline, [&] { return (status = cudaStreamQuery(link.stream)) == cudaErrorNotReady; })) {
    return too_late(link.timeout_seconds);
  }
  return status == cudaSuccess ? "" : cuda_text("ncclAllGather", status);
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

std::string exchange(const Link& link, const Note& own, std::vector<Note>* notes) {
  static_assert(std::is_trivially_copyable_v<Note>);
  const Nccl* nccl = nullptr;
  if (const std::string missing = find_nccl(&nccl); !missing.empty()) return missing;
  void* board = nullptr;
  cudaError_t status = cudaMalloc(&board, sizeof(Note) * (link.ranks + 1));
  if (status != cudaSuccess) return cuda_text("cudaMalloc", status);
  status = cudaMemcpy(board, &own, sizeof(own), cudaMemcpyHostToDevice);
  if (status != cudaSuccess) return cuda_text("cudaMemcpy", status);
  // Where it does not end the board stays: NCCL's kernel may still write to it.
  if (std::string error = gather(*nccl, link, static_cast<std::byte*>(board)); !error.empty()) return error;
  notes->resize(link.ranks);
  status = cudaMemcpy(notes->data(), static_cast<std::byte*>(board) + sizeof(Note), sizeof(Note) * link.ranks,
                      cudaMemcpyDeviceToHost);
  cudaFree(board);
  return status == cudaSuccess ? "" : cuda_text("cudaMemcpy", status);
}

}  // namespace jaxmoe
