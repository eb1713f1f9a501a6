// The loss of one token, for a scalar (CUDA, and per-sequence values) or all lanes of cpu/simd.h
// (CPU).
//
// No include guard: policy_sequence.h and the users of cpu/for_each_target.h include this in
// different namespaces.

// bool for a scalar, else lanes of -1 and 0.
template <class F>
using MaskOf = decltype(F() > F());

// f(r, A) and d f / d logp. r = exp(logp - ...), so d r / d logp = r.
template <class F>
struct Objective {
  F value, slope;
  MaskOf<F> over, under;  // r above or below its bound
};

// PPO with a separate range for each sign of A and none for A = 0. Without bounds, f = r A.
template <class F>
MRL_FN Objective<F> BoundedObjective(const F& r, const F& a, const RatioBounds& bounds) {
  const auto good = a > F(0.0f), bad = a < F(0.0f);
  const F upper = Select(good, F(bounds.upper_positive), F(bounds.upper_negative));
  const MaskOf<F> over = (r > upper) & (good | bad);
  const MaskOf<F> under = (r < F(bounds.lower_negative)) & bad;
  const F bounded = Select(over, upper, Select(under, F(bounds.lower_negative), r));
  return {a * bounded, Select(over | under, F(0.0f), a * r), over, under};
}

// CISPO: the bounded ratio is a constant factor of A logp.
template <class F>
MRL_FN Objective<F> CispoObjective(const F& r, const F& a, const F& logp,
                                   const RatioBounds& bounds) {
  const F upper(bounds.upper_positive), lower(bounds.lower_negative);
  const auto over = r > upper;
  const auto under = r < lower;
  const F factor = a * Select(over, upper, Select(under, lower, r));
  return {factor * logp, factor, over, under};
}

// SAPO: (4 / tau) sigmoid(tau (r - 1)) A. There is no bound, so nothing counts as clipped.
template <class F>
MRL_FN Objective<F> SapoObjective(const F& r, const F& a, const RatioBounds& bounds) {
  const F tau = Select(a > F(0.0f), F(bounds.tau_positive), F(bounds.tau_negative));
  const F z = tau * (r - F(1.0f));
  const F e = Exp(Select(z < F(0.0f), z, F(0.0f) - z)).exp;  // in (0, 1], so it does not overflow
  const F sigmoid = Select(z < F(0.0f), e, F(1.0f)) / (F(1.0f) + e);
  const F bell = e / ((F(1.0f) + e) * (F(1.0f) + e));
  const auto none = r < F(0.0f);
  // If r is infinite the bell is 0, and the limit of their product is 0.
  const F slope = Select(bell == F(0.0f), F(0.0f), F(4.0f) * a * bell * r);
  return {F(4.0f) * a * sigmoid / tau, slope, none, none};
}

// A KL estimator and its derivative by logp, with d = ref - logp (Schulman, "Approximating KL
// divergence", 2020). kK1Plus and kK3Plus have the values of k1 and k3 and the derivative of k2.
template <class F>
struct KlTerm {
  F value, slope;
};

template <class F>
MRL_FN KlTerm<F> KlPenalty(Kl kind, const F& d) {
  if (kind == Kl::kK1) return {F(0.0f) - d, F(1.0f)};
  if (kind == Kl::kK2) return {F(0.5f) * d * d, F(0.0f) - d};
  if (kind == Kl::kK1Plus) return {F(0.0f) - d, F(0.0f) - d};
  const auto terms = Exp(d);
  return {terms.k3, F(0.0f) - (kind == Kl::kK3Plus ? d : terms.exp_minus_1)};
}

// The weight as applied: clamped to [low, high] (TIS), or 0 outside of it (MIS). NaN is kept.
template <class F>
MRL_FN F ApplyRange(Importance kind, const F& raw, const F& low, const F& high) {
  const F within = AtMost(high, AtLeast(low, raw));
  if (kind == Importance::kTis) return within;
  return Select((within < raw) | (within > raw), F(0.0f), raw);
}
