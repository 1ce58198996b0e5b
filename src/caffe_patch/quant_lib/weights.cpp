// Weights (ARQ, tables of SNQ), statistics of a BatchNorm, and sums of integers.
#include <algorithm>
#include <vector>

#include "internal.hpp"
#include "quant.hpp"

using quant::Fail;
using quant::Grid;

int quant_arq(const float* rows, size_t row_count, size_t row_size, int bits, int channel_wise, float* scales) {
  const size_t scale_count = channel_wise ? row_count : 1, size = channel_wise ? row_size : row_count * row_size;
  if (size == 0) return Fail("a weight needs at least one value");
  for (size_t row = 0; row < scale_count; ++row) {
    const float* values = rows + row * size;
    double low = values[0], high = values[0];
    for (size_t i = 0; i < size; ++i) {
      if (!std::isfinite(values[i])) return Fail("the weights hold NaN or infinity");
      low = std::min<double>(low, values[i]);
      high = std::max<double>(high, values[i]);
    }
    int32_t offset;
    int near_zero;
    if (quant_factors(low, high, bits, 0, scales + row, &offset, &near_zero)) return 1;
  }
  return 0;
}

void quant_fake_rows(const float* rows, size_t row_count, size_t row_size, int bits, const float* scales,
                     size_t scale_count, float* out) {
  for (size_t row = 0; row < row_count; ++row) {
    quant_fake(rows + row * row_size, row_size, scales[scale_count == 1 ? 0 : row], 0, bits, out + row * row_size);
  }
}

void quant_snq_decode(const uint8_t* packed, size_t row_count, size_t row_size, const int8_t* tables,
                      size_t table_count, int8_t* rows) {
  const size_t bytes = (row_size + 1) / 2;
  for (size_t row = 0; row < row_count; ++row) {
    const int8_t* table = tables + (table_count == 1 ? 0 : 16 * row);
    for (size_t i = 0; i < row_size; ++i) {
      const uint8_t pair = packed[row * bytes + i / 2];
      rows[row * row_size + i] = table[i % 2 ? pair >> 4 : pair & 15];
    }
  }
}

void quant_bn_update(const float* x, size_t samples, size_t channels, size_t inner, float fraction, float* mean_sum,
                     float* variance_sum, float* weight) {
  const double count = static_cast<double>(samples) * inner;
  const double correction = count > 1 ? count / (count - 1) : 1;
  for (size_t channel = 0; channel < channels; ++channel) {
    double sum = 0, squares = 0;
    for (size_t sample = 0; sample < samples; ++sample) {
      const float* values = x + (sample * channels + channel) * inner;
      for (size_t i = 0; i < inner; ++i) sum += values[i];
    }
    const double mean = sum / count;
    for (size_t sample = 0; sample < samples; ++sample) {
      const float* values = x + (sample * channels + channel) * inner;
      for (size_t i = 0; i < inner; ++i) squares += (values[i] - mean) * (values[i] - mean);
    }
    mean_sum[channel] = static_cast<float>(mean_sum[channel] * fraction + mean);
    variance_sum[channel] = static_cast<float>(variance_sum[channel] * fraction + squares / count * correction);
  }
  *weight = *weight * fraction + 1;
}

namespace {

// Products of an int8 and a value of 17 bits (data minus offset) have 25 bits: so many of them fit 32 bits for sure.
const size_t kBlock = 64;

}  // namespace

void quant_integer_gemm(const int8_t* w, const int16_t* x, size_t m, size_t k, size_t n, int32_t offset,
                        int64_t* out) {
  std::fill(out, out + m * n, 0);
  std::vector<int32_t> partial(n);
  for (size_t row = 0; row < m; ++row) {
    for (size_t begin = 0; begin < k; begin += kBlock) {
      const size_t end = std::min(k, begin + kBlock);
      std::fill(partial.begin(), partial.end(), 0);
      for (size_t place = begin; place < end; ++place) {
        const int32_t factor = w[row * k + place];
        if (factor == 0) continue;
        const int16_t* values = x + place * n;
        for (size_t column = 0; column < n; ++column) partial[column] += factor * (values[column] - offset);
      }
      for (size_t column = 0; column < n; ++column) out[row * n + column] += partial[column];
    }
  }
}

void quant_dequantize_sums(const int64_t* sums, size_t m, size_t n, const int32_t* bias, const float* steps,
                           size_t step_count, float* out) {
  for (size_t row = 0; row < m; ++row) {
    const double step = steps[step_count == 1 ? 0 : row];
    const int64_t added = bias == nullptr ? 0 : bias[row];
    for (size_t i = row * n; i < (row + 1) * n; ++i) out[i] = static_cast<float>((sums[i] + added) * step);
  }
}
