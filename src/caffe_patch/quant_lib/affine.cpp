// Scale and offset, quantize, dequantize and fake-quantize; the trained clips of ULQ.
#include <algorithm>
#include <cstdio>

#include "internal.hpp"
#include "quant.hpp"

namespace quant {

namespace {
thread_local std::string last_error;  // NOLINT(runtime/string)
}

int Fail(const std::string& message) {
  last_error = message;
  return 1;
}

std::string Text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

}  // namespace quant

using quant::Fail;
using quant::Grid;
using quant::Highest;
using quant::Lowest;
using quant::Text;

const char* quant_error(void) { return quant::last_error.c_str(); }

int quant_check_factors(float scale, int32_t offset, int bits) {
  if (bits < 2 || bits > 16) return Fail("bits: expected 2..16, got " + std::to_string(bits));
  if (!(scale >= quant::kSmallestScale && scale <= quant::kLargestScale)) {
    return Fail("scale is illegal: expected " + Text(quant::kSmallestScale) + ".." + Text(quant::kLargestScale) +
                ", got " + Text(scale));
  }
  if (offset < Lowest(bits) || offset > Highest(bits)) {
    return Fail("offset is illegal: expected " + std::to_string(Lowest(bits)) + ".." + std::to_string(Highest(bits)) +
                ", got " + std::to_string(offset));
  }
  return 0;
}

int quant_factors(double minimum, double maximum, int bits, int with_offset, float* scale, int32_t* offset,
                  int* near_zero) {
  if (bits < 2 || bits > 16) return Fail("bits: expected 2..16, got " + std::to_string(bits));
  const std::string range = "minimum " + Text(minimum) + ", maximum " + Text(maximum);
  if (!(std::isfinite(minimum) && std::isfinite(maximum) && minimum <= maximum)) {
    return Fail("a range must be finite with minimum <= maximum, got " + range +
                "; the data holds NaN or infinity, or is empty");
  }
  const double below = std::min(minimum, 0.0);
  const double wanted = with_offset
                            ? (std::max(maximum, 0.0) - below) / (Highest(bits) - Lowest(bits))
                            : std::max(std::fabs(minimum), std::fabs(maximum)) / Highest(bits);
  if (static_cast<float>(wanted) > quant::kLargestScale) {
    return Fail("the range is too large for " + std::to_string(bits) + " bits: the scale must not exceed " +
                Text(quant::kLargestScale) + ", got " + range + ", scale " + Text(wanted) +
                "; look for a diverged layer or an outlier in the data, or leave this layer in float");
  }
  *scale = static_cast<float>(wanted);
  *near_zero = *scale < quant::kSmallestScale;
  if (*near_zero) {
    *scale = 1.0f;
    *offset = with_offset ? Lowest(bits) : 0;
  } else if (with_offset) {
    *offset = Lowest(bits) - static_cast<int32_t>(std::nearbyint(static_cast<float>(below) / *scale));
  } else {
    *offset = 0;
  }
  return 0;
}

int quant_quantize(const float* x, size_t count, float scale, int32_t offset, int bits, int32_t* q) {
  if (quant_check_factors(scale, offset, bits)) return 1;
  const Grid grid(scale, offset, bits);
  size_t nan = 0;
  for (size_t i = 0; i < count; ++i) {
    const float steps = grid.Round(x[i]);
    if (steps != steps) {
      ++nan;
    } else {
      q[i] = static_cast<int32_t>(steps) + offset;
    }
  }
  if (nan == 0) return 0;
  return Fail("NaN cannot be quantized: " + std::to_string(nan) + " of " + std::to_string(count) +
              " values are NaN; look for the layer where they first appear");
}

void quant_dequantize(const int32_t* q, size_t count, float scale, int32_t offset, float* x) {
  for (size_t i = 0; i < count; ++i) x[i] = static_cast<float>(static_cast<int64_t>(q[i]) - offset) * scale;
}

void quant_fake(const float* x, size_t count, float scale, int32_t offset, int bits, float* out) {
  const Grid grid(scale, offset, bits);
  for (size_t i = 0; i < count; ++i) out[i] = grid.Round(x[i]) * grid.step;
}

void quant_fake_gradient(const float* x, const float* upstream, size_t count, float scale, int32_t offset, int bits,
                         float* gradient) {
  const Grid grid(scale, offset, bits);
  for (size_t i = 0; i < count; ++i) {
    const float steps = std::nearbyint(x[i] * grid.inverse);
    gradient[i] = steps >= grid.lowest && steps <= grid.highest ? upstream[i] : 0.0f;
  }
}

int quant_ulq_legal(float* clip_min, float* clip_max, float valid_min, float valid_max) {
  const bool met = *clip_min == *clip_max;
  const bool is_low_illegal = met || *clip_min > 0, is_high_illegal = met || *clip_max < 0;
  if (is_low_illegal) *clip_min = valid_min;
  if (is_high_illegal) *clip_max = valid_max;
  return is_low_illegal || is_high_illegal;
}

void quant_ulq_factors(float clip_min, float clip_max, int bits, float* scale, int32_t* offset) {
  const double below = std::min(static_cast<double>(clip_min), 0.0);
  *scale = static_cast<float>((std::max(static_cast<double>(clip_max), 0.0) - below) / (Highest(bits) - Lowest(bits)));
  if (*scale < quant::kSmallestScale) {
    *scale = 1.0f;
    *offset = Lowest(bits);
  } else {
    *offset = Lowest(bits) - static_cast<int32_t>(std::nearbyint(static_cast<float>(below) / *scale));
  }
}

void quant_ulq_forward(const float* x, size_t count, float clip_min, float clip_max, int bits, float* out) {
  float scale;
  int32_t offset;
  quant_ulq_factors(clip_min, clip_max, bits, &scale, &offset);
  quant_fake(x, count, scale, offset, bits, out);
}

void quant_ulq_backward(const float* x, const float* upstream, size_t count, float clip_min, float clip_max, int bits,
                        float* gradient, float* gradient_min, float* gradient_max) {
  float scale;
  int32_t offset;
  quant_ulq_factors(clip_min, clip_max, bits, &scale, &offset);
  const Grid grid(scale, offset, bits);
  const float lower = grid.step * grid.lowest, upper = grid.step * grid.highest;
  // What is cut off has the rounding error of the clip that it is cut to.
  const float low = clip_min * grid.inverse, high = clip_max * grid.inverse;
  const float lower_error = std::nearbyint(low) - low, upper_error = std::nearbyint(high) - high;
  double rounding = 0, above = 0, below = 0;
  for (size_t i = 0; i < count; ++i) {
    const bool is_above = x[i] > upper, is_below = x[i] < lower;
    const float scaled = x[i] * grid.inverse;
    const float error = is_below ? lower_error : is_above ? upper_error : std::nearbyint(scaled) - scaled;
    rounding += static_cast<double>(error * upstream[i]);
    if (is_above) above += upstream[i];
    if (is_below) below += upstream[i];
    gradient[i] = is_above || is_below ? 0.0f : upstream[i];
  }
  rounding /= (1 << bits) - 1;
  *gradient_min = static_cast<float>(below - rounding);
  *gradient_max = static_cast<float>(above + rounding);
}
