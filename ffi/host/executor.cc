// See executor.h.
#include "host/executor.h"

#include "host/rank.h"

namespace jaxmoe::host {

template <class Precision>
std::string run_rank(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays, LaunchTimeline* timeline) {
  if constexpr (!Precision::kScaled) {
    if (launch.schedule.backward()) return Rank<Pass::kBackward, Precision>(launch, rank, arrays, timeline).run();
  }
  return Rank<Pass::kForward, Precision>(launch, rank, arrays, timeline).run();
}

template std::string run_rank<F32>(const Launch&, int32_t, const ArraysOf<F32>&, LaunchTimeline*);
template std::string run_rank<F64>(const Launch&, int32_t, const ArraysOf<F64>&, LaunchTimeline*);
template std::string run_rank<Bf16>(const Launch&, int32_t, const ArraysOf<Bf16>&, LaunchTimeline*);
template std::string run_rank<F16>(const Launch&, int32_t, const ArraysOf<F16>&, LaunchTimeline*);
template std::string run_rank<EightBit<F32>>(const Launch&, int32_t, const ArraysOf<EightBit<F32>>&, LaunchTimeline*);
template std::string run_rank<EightBit<Bf16>>(const Launch&, int32_t, const ArraysOf<EightBit<Bf16>>&, LaunchTimeline*);
template std::string run_rank<EightBit<F16>>(const Launch&, int32_t, const ArraysOf<EightBit<F16>>&, LaunchTimeline*);
template std::string run_rank<Decoded<F32>>(const Launch&, int32_t, const ArraysOf<Decoded<F32>>&, LaunchTimeline*);
template std::string run_rank<Decoded<Bf16>>(const Launch&, int32_t, const ArraysOf<Decoded<Bf16>>&, LaunchTimeline*);
template std::string run_rank<Decoded<F16>>(const Launch&, int32_t, const ArraysOf<Decoded<F16>>&, LaunchTimeline*);

}  // namespace jaxmoe::host
