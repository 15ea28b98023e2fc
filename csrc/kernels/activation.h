// The activations, written once over the vector type V of an instruction set.
// Include after the set's vec.h, inside no namespace; everything here has internal linkage.
#pragma once

namespace {

// x * sigmoid(alpha x)
inline V::F silu(V::F x, V::F alpha) {
  return V::div(x, V::add(V::set(1.0f), V::exp(V::sub(V::zero(), V::mul(alpha, x)))));
}

// erfc(z) for z >= 0, relative error below 1.2e-7 before rounding: W. H. Press et al., Numerical
// Recipes in C, 2nd edition, section 6.2 (erfcc).
inline V::F erfc_positive(V::F z) {
  const V::F t = V::div(V::set(1.0f), V::fma(z, V::set(0.5f), V::set(1.0f)));
  V::F p = V::set(0.17087277f);
  p = V::fma(p, t, V::set(-0.82215223f));
  p = V::fma(p, t, V::set(1.48851587f));
  p = V::fma(p, t, V::set(-1.13520398f));
  p = V::fma(p, t, V::set(0.27886807f));
  p = V::fma(p, t, V::set(-0.18628806f));
  p = V::fma(p, t, V::set(0.09678418f));
  p = V::fma(p, t, V::set(0.37409196f));
  p = V::fma(p, t, V::set(1.00002368f));
  p = V::fma(p, t, V::set(-1.26551223f));
  return V::mul(t, V::exp(V::sub(p, V::mul(z, z))));
}

// x * Phi(x). The lower tail comes from erfc itself, so nothing cancels there.
inline V::F gelu(V::F x) {
  const V::F z = V::mul(V::abs(x), V::set(0.70710678f));
  const V::F tail = V::mul(V::mul(x, V::set(0.5f)), erfc_positive(z));
  return V::select_negative(x, tail, V::sub(x, tail));
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
inline V::F gelu_tanh(V::F x) {
  const V::F cubic = V::fma(V::mul(x, x), V::set(0.044715f), V::set(1.0f));
  const V::F twice = V::mul(V::mul(x, cubic), V::set(1.5957691216f));
  return V::div(x, V::add(V::set(1.0f), V::exp(V::sub(V::zero(), twice))));
}

inline V::F relu_squared(V::F x) {
  const V::F positive = V::max(V::zero(), x);
  return V::mul(positive, positive);
}

inline V::F activate_gate(const moe::Layer& layer, V::F gate) {
  switch (layer.activation) {
    case moe::Activation::kGelu:
      return gelu(gate);
    case moe::Activation::kGeluTanh:
      return gelu_tanh(gate);
    case moe::Activation::kRelu2:
      return relu_squared(gate);
    case moe::Activation::kSilu:
      break;
  }
  return silu(gate, V::set(layer.alpha));
}

inline V::F activate(const moe::Layer& layer, V::F gate, V::F up) {
  const V::F limit = V::set(layer.limit);
  gate = V::min(limit, gate);
  up = V::max(V::sub(V::zero(), limit), V::min(limit, up));
  return V::mul(activate_gate(layer, gate), V::add(up, V::set(layer.beta)));
}

}  // namespace
