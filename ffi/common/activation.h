// What an expert applies between its two GEMMs: h = activate(activation, gate, up), or of gate alone where the
// experts have no up projection. The epilogue of the GPU kernel and the host executor share this file;
// jaxmoe/activation.py holds the same table for JAX. Plain C++20, no CUDA.
//
// In float32 on a GPU the sigmoid is made of the hardware's base-2 exponential and reciprocal. Together with the
// rounding of their argument their relative error stays under 1e-5 where the result is a normal number, against the
// 4e-3 of rounding h to bfloat16 and the 5e-4 of float16.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/shape.h"

namespace jaxmoe {

enum class ActivationKind : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSwiGlu = 4 };

struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  // Of kSwiGlu alone: (clip(up, -limit, limit) + up_offset) * g * sigmoid(alpha * g) with g = min(gate, limit).
  float limit = std::numeric_limits<float>::infinity();
  float alpha = 1.0f;
  float up_offset = 0.0f;
};

template <class Number>
JAXMOE_ANY inline Number sigmoid(Number x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Number) == sizeof(float)) {
    // Beyond +-127 the power is 0 or infinity and the result 1 or 0; NaN stays NaN.
    float power;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));  // log2(e)
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
  }
#endif
  return Number(1) / (Number(1) + std::exp(-x));
}

template <class Number>
JAXMOE_ANY inline Number exponential(Number x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Number) == sizeof(float)) return __expf(x);
#endif
  return std::exp(x);
}

// erfc(z). The library's takes more registers than a GPU's epilogue has: there it is t exp(p(t) - z^2) with
// t = 1 / (1 + |z| / 2) and p the Chebyshev fit of degree 9 to log(erfc(z) exp(z^2) / t) on 0 < t <= 1, whose own error
// is 1.0e-7; with the rounding of exponents up to 10 the relative error stays under 2e-6.
template <class Number>
JAXMOE_ANY inline Number complementary_error(Number z) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Number) == sizeof(float)) {
    const float size = fabsf(z);
    float t;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(1.0f + 0.5f * size));
    float p = 0.1708727777004242f;
    p = p * t - 0.8221522569656372f;
    p = p * t + 1.488515853881836f;
    p = p * t - 1.1352039575576782f;
    p = p * t + 0.27886807918548584f;
    p = p * t - 0.18628805875778198f;
    p = p * t + 0.09678418934345245f;
    p = p * t + 0.3740919530391693f;
    p = p * t + 1.0000237226486206f;
    p = p * t - 1.265512228012085f;
    const float tail = t * __expf(p - size * size);
    return z < 0.0f ? 2.0f - tail : tail;
  }
#endif
  return std::erfc(z);
}

// f(gate) of the pointwise kinds.
template <ActivationKind kKind, class Number>
JAXMOE_ANY inline Number pointwise(Number gate) {
  if constexpr (kKind == ActivationKind::kSilu) {
    return gate * sigmoid(gate);
  } else if constexpr (kKind == ActivationKind::kGelu) {
    return gate * (Number(0.5) * complementary_error(gate * Number(-0.70710678118654752)));  // times the normal CDF
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    // 0.5 (1 + tanh(u)) is sigmoid(2 u), which loses no digits where tanh(u) is near -1. 2 sqrt(2 / pi) = 1.5957...
    return gate * sigmoid(Number(1.5957691216057308) * (gate + Number(0.044715) * gate * gate * gate));
  } else {
    static_assert(kKind == ActivationKind::kRelu);
    return gate <= Number(0) ? Number(0) : gate;  // NaN stays NaN
  }
}

// For a kind that the compiler knows. Plain experts pass up = 1, which changes no bit of f(gate).
template <ActivationKind kKind, class Number>
JAXMOE_ANY inline Number activate_as(const Activation& activation, Number gate, Number up) {
  if constexpr (kKind == ActivationKind::kSwiGlu) {
    const Number limit = activation.limit;
    gate = gate > limit ? limit : gate;  // comparisons and not min and max: NaN stays NaN
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return (up + Number(activation.up_offset)) * gate * sigmoid(Number(activation.alpha) * gate);
  } else {
    return pointwise<kKind>(gate) * up;
  }
}

// h and its slopes along gate and up.
template <class Number>
struct Slopes {
  Number h, gate, up;
};

// f'(gate) of the pointwise kinds, and f(gate) with what both need computed once.
template <ActivationKind kKind, class Number>
JAXMOE_ANY inline Number pointwise_slope(Number gate, Number& value) {
  if constexpr (kKind == ActivationKind::kSilu) {
    const Number s = sigmoid(gate);
    value = gate * s;
    return s * (Number(1) + gate * (Number(1) - s));
  } else if constexpr (kKind == ActivationKind::kGelu) {
    const Number cdf = Number(0.5) * complementary_error(gate * Number(-0.70710678118654752));
    value = gate * cdf;
    return cdf + gate * Number(0.39894228040143268) * exponential(Number(-0.5) * gate * gate);  // 1 / sqrt(2 pi)
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    const Number square = gate * gate;
    const Number s = sigmoid(Number(1.5957691216057308) * gate * (Number(1) + Number(0.044715) * square));
    value = gate * s;
    return s + gate * s * (Number(1) - s) * Number(1.5957691216057308) * (Number(1) + Number(0.134145) * square);
  } else {
    static_assert(kKind == ActivationKind::kRelu);
    value = pointwise<kKind>(gate);
    return gate <= Number(0) ? Number(0) : Number(1);
  }
}

// Of what activate_as() computes. Beyond a limit the slope is zero, at the limit it is not (jaxmoe/activation.py).
template <ActivationKind kKind, class Number>
JAXMOE_ANY inline Slopes<Number> slopes_as(const Activation& activation, Number gate, Number up) {
  if constexpr (kKind == ActivationKind::kSwiGlu) {
    const Number limit = activation.limit;
    const Number alpha = activation.alpha;
    const bool gate_beyond = gate > limit;
    const bool up_beyond = up > limit || up < -limit;
    gate = gate_beyond ? limit : gate;
    up = up > limit ? limit : up;
    up = (up < -limit ? -limit : up) + Number(activation.up_offset);
    const Number s = sigmoid(alpha * gate);
    const Number slope = s * (Number(1) + alpha * gate * (Number(1) - s));
    return {up * gate * s, gate_beyond ? Number(0) : up * slope, up_beyond ? Number(0) : gate * s};
  } else {
    Number value;
    const Number slope = pointwise_slope<kKind>(gate, value);
    return {value * up, slope * up, value};
  }
}

template <ActivationKind kKind>
struct ActivationKindOf {
  static constexpr ActivationKind value = kKind;
};

// Calls body(ActivationKindOf<kind>{}), so that a loop over many elements decides once, outside.
template <class Body>
JAXMOE_ANY inline auto with_activation_kind(ActivationKind kind, Body&& body) {
  switch (kind) {
    case ActivationKind::kGelu: return body(ActivationKindOf<ActivationKind::kGelu>{});
    case ActivationKind::kGeluTanh: return body(ActivationKindOf<ActivationKind::kGeluTanh>{});
    case ActivationKind::kRelu: return body(ActivationKindOf<ActivationKind::kRelu>{});
    case ActivationKind::kSwiGlu: return body(ActivationKindOf<ActivationKind::kSwiGlu>{});
    default: return body(ActivationKindOf<ActivationKind::kSilu>{});
  }
}

template <class Number>
JAXMOE_ANY inline Number activate(const Activation& activation, Number gate, Number up) {
  return with_activation_kind(activation.kind, [&](auto kind) {
    return activate_as<decltype(kind)::value>(activation, gate, up);
  });
}
template <class Number>
JAXMOE_ANY inline Slopes<Number> slopes_of(const Activation& activation, Number gate, Number up) {
  return with_activation_kind(activation.kind, [&](auto kind) {
    return slopes_as<decltype(kind)::value>(activation, gate, up);
  });
}
template <class Number>
JAXMOE_ANY inline Number activate(const Activation& activation, Number gate) {
  return activate(activation, gate, Number(1));
}

}  // namespace jaxmoe
