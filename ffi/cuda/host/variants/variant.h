// The kernels that are compiled: one for each pass and precision, each in a file of its own beside this one. Another
// precision is another policy (kernel/gemm/precision/), two files here, and two lines below and in launch.cu.
#pragma once

#include <cstddef>

#include "common/formats.h"
#include "common/scheduler.h"

namespace jaxmoe {

#ifdef JAXMOE_TIMELINE
inline constexpr bool kTimeline = true;
#else
inline constexpr bool kTimeline = false;
#endif

// What a kernel does with weights that have fewer bits than what they are multiplied with.
enum class Decoding {
  kNone,
  kAhead,        // into a ring, expert by expert (kernel/exchange/decode.cuh)
  kInRegisters,  // when they are multiplied (kernel/gemm/packed.cuh, packed_eight_bit.cuh)
};

// A kernel as the host starts it.
struct KernelVariant {
  Pass pass;                 // whose parameters are ForwardParams, BackwardParams, ExchangeParams or MatmulParams
  Element tokens;            // and all that is multiplied with them
  Element wide;              // x, biases, answers
  Decoding decoding;
  Accumulation accumulation;
  const void* kernel;
  std::size_t shared_bytes;  // of a block
  bool records_timeline;
  int32_t most_local_experts;
  bool sums_at_experts;
  bool takes_repacked;  // weights in registers, and no others in 4 bits; ahead all are decoded
};

KernelVariant forward_bf16();
KernelVariant forward_f16();
KernelVariant forward_e4m3_bf16();  // 8-bit tokens, h and weights; 16-bit x, biases and answers
KernelVariant forward_e4m3_f16();
KernelVariant forward_e4m3_fast_bf16();  // the same, summed by the tensor cores
KernelVariant forward_e4m3_fast_f16();
KernelVariant forward_decoded_bf16();  // weights in 8 or 4 bits, everything else in 16
KernelVariant forward_decoded_f16();
KernelVariant forward_decoded_e4m3_bf16();  // weights in 4 bits; 8-bit tokens and h
KernelVariant forward_packed_bf16();   // weights in 4 bits, for experts with few rows
KernelVariant forward_repacked_bf16();  // the same, whose words lie as registers take them
KernelVariant forward_packed_e4m3_bf16();  // as forward_packed_bf16; 8-bit tokens and h
KernelVariant forward_sums_bf16();  // answers added up at experts
KernelVariant forward_sums_f16();
KernelVariant forward_sums_e4m3_bf16();
KernelVariant dispatch_bf16();  // of experts of the caller's own (common/exchange.h)
KernelVariant dispatch_f16();
KernelVariant dispatch_e4m3_bf16();  // rows that are rounded to 8 bits
KernelVariant dispatch_e4m3_f16();
KernelVariant combine_bf16();
KernelVariant combine_f16();
KernelVariant dispatch_matmul_bf16();  // halves of a layer
KernelVariant dispatch_matmul_f16();
KernelVariant matmul_combine_bf16();
KernelVariant matmul_combine_f16();
KernelVariant backward_bf16();
KernelVariant backward_f16();
KernelVariant backward_decoded_bf16();  // no gradients of weights
KernelVariant backward_decoded_f16();

}  // namespace jaxmoe
