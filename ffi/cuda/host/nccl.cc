#include "cuda/host/nccl.h"

#include <dlfcn.h>

#include <type_traits>

namespace jaxmoe {
namespace {

struct Search {
  Nccl nccl{};
  std::string problem;

  Search() {
    // Only the copy that is there already knows XLA's communicators.
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) {
      problem = "XLA has not loaded libnccl.so.2. Install the packages of `jaxmoe[cuda13]`.";
      return;
    }
    const auto find = [&](auto& function, const char* name) {
      void* symbol = dlsym(library, name);
      if (symbol == nullptr && problem.empty()) {
        problem.append("The loaded libnccl.so.2 has no ").append(name).append(".");
      }
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    find(nccl.error_text, "ncclGetErrorString");
    find(nccl.async_error, "ncclCommGetAsyncError");
    find(nccl.count, "ncclCommCount");
    find(nccl.rank, "ncclCommUserRank");
    find(nccl.device, "ncclCommCuDevice");
    find(nccl.all_gather, "ncclAllGather");
  }
};

}  // namespace

std::string find_nccl(const Nccl** nccl) {
  static const Search search;
  *nccl = &search.nccl;
  return search.problem;
}

}  // namespace jaxmoe
