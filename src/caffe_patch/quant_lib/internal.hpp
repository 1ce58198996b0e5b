// What the sources of the library share.
#ifndef AMCT_QUANT_INTERNAL_HPP_
#define AMCT_QUANT_INTERNAL_HPP_

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>

namespace quant {

const double kSmallestScale = FLT_EPSILON;
const double kLargestScale = 1.0 / FLT_EPSILON;

// Keeps the message for quant_error() and returns 1.
int Fail(const std::string& message);

inline int32_t Lowest(int bits) { return -(1 << (bits - 1)); }
inline int32_t Highest(int bits) { return (1 << (bits - 1)) - 1; }

// Round to nearest, halves to even, for magnitudes below 2^22: vectorized by every compiler, unlike nearbyint.
inline float RoundSmall(float x) {
  const float kMagic = 12582912.0f;  // 1.5 * 2^23, from where on floats are whole numbers
  return (x + kMagic) - kMagic;
}

// The grid as the loops use it: limits in steps from zero, so that the offset need not be added and subtracted.
struct Grid {
  float inverse, step, lowest, highest;

  Grid(float scale, int32_t offset, int bits)
      : inverse(1.0f / scale),
        step(scale),
        lowest(static_cast<float>(Lowest(bits) - offset)),
        highest(static_cast<float>(Highest(bits) - offset)) {}

  float Round(float x) const {
    float steps = x * inverse;
    steps = steps < lowest ? lowest : steps;  // NaN fails both comparisons and stays
    steps = steps > highest ? highest : steps;
    return RoundSmall(steps);
  }
};

std::string Text(double value);

}  // namespace quant

#endif  // AMCT_QUANT_INTERNAL_HPP_
