#include "cuda/host/meeting.h"

#include <cstring>
#include <string>

#include "common/layout.h"
#include "cuda/host/errors.h"

namespace ffi = xla::ffi;

namespace jaxmoe {

ffi::ErrorOr<Members> meet_group(int32_t device, const Link& link, const Membership& self,
                                 const std::vector<int64_t>& devices) {
  Gpu& gpu = Gpu::of(device);
  cudaDeviceProp properties{};
  std::string error = gpu.failure();
  if (error.empty()) error = gpu.prepare();
  // Not beside a kernel that waits for peers: what follows allocates and may load a kernel of NCCL's.
  if (error.empty()) error = gpu.await_earlier_work(link);
  if (error.empty()) {
    const cudaError_t status = cudaGetDeviceProperties(&properties, device);
    if (status != cudaSuccess) error = cuda_text("cudaGetDeviceProperties", status);
  }
  Note own{};
  if (error.empty()) error = name_block({}, &own.block);
  static_assert(sizeof(own.gpu) == sizeof(properties.uuid));
  std::memcpy(own.gpu, &properties.uuid, sizeof(own.gpu));
  Agreement names;
  names.add(link.ranks);
  for (const int64_t name : devices) names.add(name);
  own.agreement = names.hash();
  std::vector<Note> notes;
  if (error.empty()) error = gpu.exchange(link, own, &notes);
  if (!error.empty()) {
    return ffi::Unexpected(
        ffi::Error::Internal("jaxmoe: the ranks could not tell each other who they are. " + error + kRestart));
  }
  Members members;
  for (int32_t rank = 0; rank < link.ranks; ++rank) {
    if (notes[rank].agreement != own.agreement) {
      return ffi::Unexpected(ffi::Error(
          ffi::ErrorCode::kFailedPrecondition,
          "jaxmoe: the program of rank " + std::to_string(self.rank) + " names other devices than that of rank " +
              std::to_string(rank) + ". All processes have to run the same program on the same mesh."));
    }
    const Note& note = notes[rank];
    members.emplace_back(std::vector(std::begin(note.gpu), std::end(note.gpu)), note.block.process);
  }
  return members;
}

ffi::Error meet(Gpu& gpu, const Link& link, const WantedArena& wanted, const SharedMemory& memory, const char* step,
                bool succeeded, std::vector<Note>* notes) {
  Note own{};
  own.agreement = wanted.agreement;
  own.bytes = wanted.bytes;
  own.succeeded = succeeded;
  std::string error = name_block(memory, &own.block);
  if (error.empty()) error = gpu.exchange(link, own, notes);
  if (!error.empty()) {
    return ffi::Error::Internal("jaxmoe: the ranks could not share their memory. " + error + kRestart);
  }
  for (int32_t rank = 0; rank < link.ranks; ++rank) {
    const Note& note = (*notes)[rank];
    if (note.bytes != wanted.bytes || note.agreement != wanted.agreement) {
      return ffi::Error::Internal(
          "jaxmoe: rank " + std::to_string(wanted.rank) + " wants an arena of " + std::to_string(wanted.bytes) +
          " bytes, rank " + std::to_string(rank) + " one of " + std::to_string(note.bytes) +
          (note.agreement == wanted.agreement ? "" : ", for other sizes of the layer or in another order of the work") +
          ". All ranks have to run the same programs in the same order, with the same plan and the same build of "
          "jaxmoe.");
    }
    if (!note.succeeded && succeeded) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "jaxmoe: rank " + std::to_string(rank) + " could not " + step +
                            " its arena of " + bytes_text(wanted.bytes) + "; its own error says more.");
    }
  }
  return ffi::Error::Success();
}

}  // namespace jaxmoe
