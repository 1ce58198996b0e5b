// Calls every function of the library once, for the sanitizers.
#include <cmath>
#include <cstdio>
#include <vector>

#include "quant.hpp"

int main() {
  std::vector<float> x(300000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.37f * i) * std::exp(std::sin(0.0011f * i) * 4);
  std::vector<float> out(x.size()), scales(3);
  std::vector<int32_t> q(x.size());
  float scale, low, high;
  int32_t offset;
  int near_zero;
  int failed = quant_check_factors(0.1f, 3, 8) + quant_factors(-1, 2, 8, 1, &scale, &offset, &near_zero);
  for (int bits : {8, 12, 16}) {
    failed += quant_quantize(x.data(), x.size(), scale, offset, bits, q.data());
    quant_dequantize(q.data(), q.size(), scale, offset, out.data());
    quant_fake(x.data(), x.size(), scale, offset, bits, out.data());
    quant_fake_gradient(x.data(), x.data(), x.size(), scale, offset, bits, out.data());
    for (size_t count : {size_t(1), size_t(1000), size_t(70000), x.size()}) {
      const quant_ifmr_settings settings = {bits, bits != 12, 0.7, 1.3, 0.01, 0.99999, 0.99999, 2};
      quant_ifmr* observer = quant_ifmr_new(&settings);
      quant_ifmr_result result;
      for (int batch = 0; batch < 2; ++batch) failed += quant_ifmr_observe(observer, x.data(), count);
      failed += quant_ifmr_find(observer, &result);
      quant_ifmr_free(observer);
    }
    quant_ulq_forward(x.data(), x.size(), -1, 2, bits, out.data());
    quant_ulq_backward(x.data(), x.data(), x.size(), -1, 2, bits, out.data(), &low, &high);
  }
  quant_ulq_legal(&low, &high, -1, 1);
  failed += quant_arq(x.data(), 3, 7, 8, 1, scales.data()) + quant_arq(x.data(), 3, 7, 8, 0, scales.data());
  quant_fake_rows(x.data(), 3, 7, 8, scales.data(), 1, out.data());
  std::vector<int8_t> integers(21);
  std::vector<int32_t> bias_steps(3);
  size_t scale_count;
  failed += quant_find_integers(out.data(), 3, 7, nullptr, 0.5f, integers.data(), scales.data(), &scale_count);
  failed += 1 - quant_find_integers(x.data(), 3, 7, x.data(), 0.5f, integers.data(), scales.data(), &scale_count);
  quant_sum_steps(integers.data(), 3, 7, scales.data(), 1, x.data(), 0.5f, bias_steps.data(), out.data());
  const std::vector<uint8_t> packed(12, 0xf3);
  const std::vector<int8_t> table(16, 5);
  std::vector<int8_t> rows(21);
  quant_snq_decode(packed.data(), 3, 7, table.data(), 1, rows.data());
  std::vector<float> mean(3), variance(3), weight(1);
  quant_bn_update(x.data(), 2, 3, 50, 0.9f, mean.data(), variance.data(), weight.data());
  const std::vector<int16_t> data(7 * 5, 32767);
  std::vector<int64_t> sums(3 * 5);
  quant_integer_gemm(rows.data(), data.data(), 3, 7, 5, -32768, sums.data());
  quant_dequantize_sums(sums.data(), 3, 5, nullptr, scales.data(), 1, out.data());
  std::puts(failed == 0 ? "done" : quant_error());
  return failed;
}
