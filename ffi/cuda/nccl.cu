#include "cuda/nccl.h"

#if JAXMOE_HAS_NCCL

#include <dlfcn.h>

#include <type_traits>

namespace jaxmoe {
namespace {

std::string version_text(int version) {  // 22809: 2.28.9
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

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
    decltype(&::ncclGetVersion) version = nullptr;
    find(version, "ncclGetVersion");
    find(nccl.error_text, "ncclGetErrorString");
    find(nccl.last_error, "ncclGetLastError");
    find(nccl.async_error, "ncclCommGetAsyncError");
    find(nccl.count, "ncclCommCount");
    find(nccl.rank, "ncclCommUserRank");
    find(nccl.device, "ncclCommCuDevice");
    find(nccl.team_in_reach, "ncclTeamLsa");
    find(nccl.allocate, "ncclMemAlloc");
    find(nccl.free, "ncclMemFree");
    find(nccl.register_window, "ncclCommWindowRegister");
    find(nccl.deregister_window, "ncclCommWindowDeregister");
    if (version != nullptr) version(&nccl.version);
    if (!problem.empty() || nccl.version < kOldestNccl) {
      if (!problem.empty()) problem.push_back(' ');
      problem.append("It is NCCL ").append(version_text(nccl.version));
      problem.append("; version 2.28 or newer is needed (pip install --upgrade nvidia-nccl-cu13).");
    }
  }
};

}  // namespace

std::string find_nccl(const Nccl** nccl) {
  static const Search search;
  *nccl = &search.nccl;
  return search.problem;
}

}  // namespace jaxmoe

#endif
