// exp(x), and exp(x) - 1 and exp(x) - 1 - x without cancellation, for a scalar float (CUDA) or all
// lanes of cpu/simd.h (CPU).
//
// No include guard: scalar.h and the users of cpu/for_each_target.h include this in different
// namespaces.

template <class F>
struct ExpTerms {
  F exp;          // to about 1 ulp; exactly 1 at 0; inf on overflow, NaN for NaN
  F exp_minus_1;  // relative accuracy also near 0
  F k3;           // exp(x) - 1 - x >= 0, relative accuracy also near 0
};

// Cephes' expf polynomial: e^r = 1 + r + r^2 q(r) for |r| <= ln(2)/2.
template <class F>
MRL_FN F AboveOnePlus(const F& r) {
  F q = F(1.9875691500e-4f);
  q = q * r + F(1.3981999507e-3f);
  q = q * r + F(8.3334519073e-3f);
  q = q * r + F(4.1665795894e-2f);
  q = q * r + F(1.6666665459e-1f);
  q = q * r + F(5.0000001201e-1f);
  return (q * r) * r;
}

template <class F>
MRL_FN ExpTerms<F> Exp(const F& x) {
  if (AllSmaller(x, 0.34f)) {  // true for most log-ratios; the same bits as below for half the work
    const F above = AboveOnePlus(x);
    return {(above + x) + F(1.0f), above + x, above};
  }
  const F round(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F y = Select(x > F(89.0f), F(89.0f), x);
  y = Select(y < F(-104.0f), F(-104.0f), y);
  const F n = (y * F(1.44269504088896341f) + round) - round;
  const F r = (y - n * F(0.693359375f)) - n * F(-2.12194440e-4f);  // n * 0.693359375 is exact
  const F above = AboveOnePlus(r);
  const F exp = TimesPowerOfTwo((above + r) + F(1.0f), n);
  const auto near_0 = n == F(0.0f);
  return {exp, Select(near_0, above + r, exp - F(1.0f)),
          Select(near_0, above, (exp - F(1.0f)) - x)};
}
