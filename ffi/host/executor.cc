// See executor.h.
#include "host/executor.h"

#include "host/backward_rank.h"
#include "host/forward_rank.h"

namespace jaxmoe::host {

template <class Format>
std::string run_rank(const Launch& launch, int32_t rank, const LayerArrays<Format>& arrays, LaunchTimeline* timeline) {
  if (launch.schedule.backward()) return BackwardRank<Format>(launch, rank, arrays, timeline).run();
  return ForwardRank<Format>(launch, rank, arrays, timeline).run();
}

template std::string run_rank<F32>(const Launch&, int32_t, const LayerArrays<F32>&, LaunchTimeline*);
template std::string run_rank<F64>(const Launch&, int32_t, const LayerArrays<F64>&, LaunchTimeline*);
template std::string run_rank<Bf16>(const Launch&, int32_t, const LayerArrays<Bf16>&, LaunchTimeline*);
template std::string run_rank<F16>(const Launch&, int32_t, const LayerArrays<F16>&, LaunchTimeline*);

}  // namespace jaxmoe::host
