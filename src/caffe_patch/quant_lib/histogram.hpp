// Observed values: all of them while they are few, then counts by distinct value, then counts by their top bits.
#ifndef AMCT_QUANT_HISTOGRAM_HPP_
#define AMCT_QUANT_HISTOGRAM_HPP_

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace quant {

// Values spread evenly over low..high; a bin of no width holds equal values.
struct Bin {
  double low, high, count;
};

// Counts of float32 values. A bin is a sign, an exponent and the first bits of a mantissa; the outermost values of each
// sign, among which a range is cut, are kept as they are. Neither depends on the order of the values.
class Histogram {
 public:
  // Of large batches one run of values in 2, 4, ... 64 is counted so that enough are counted.
  Histogram(int bits, size_t enough);

  void Add(const float* values, size_t count);
  void AddCounted(const std::unordered_map<uint32_t, int64_t>& counts);
  std::vector<Bin> Bins();

 private:
  void Count(uint32_t pattern, int64_t weight);
  void KeepOuter(const float* values, size_t count);
  void Keep(uint32_t pattern);
  void TrimTails();

  const int shift_;
  const size_t tail_;
  const size_t enough_;
  std::vector<int64_t> counts_[512];  // by sign and exponent; empty where there is no value
  std::vector<uint32_t> outer_[2];  // magnitudes of positive and of negative values, as bit patterns
  uint32_t limits_[2];
  int64_t total_;
  size_t largest_weight_;
};

// One run in how many is counted of a batch; 1: all values.
size_t SamplingInterval(const float* values, size_t count, size_t enough);

class Samples {
 public:
  // batches: how many will come; 0: it is not known.
  Samples(int bits, int64_t batches);
  ~Samples();

  // The values must be finite.
  void Add(const float* values, size_t count);

  bool is_exact() const { return is_exact_; }
  int64_t count() const { return count_; }
  // Sorted; only while they are exact.
  const std::vector<float>& Sorted();
  std::vector<Bin> Bins();

 private:
  Samples(const Samples&);
  void operator=(const Samples&);
  void AddCounted(const float* values, size_t count);
  Histogram* MakeHistogram();

  const int bits_;
  const int64_t batches_;
  const size_t enough_;
  bool is_exact_, is_first_;
  int64_t count_;
  float minimum_, maximum_;
  std::vector<float> values_;
  std::vector<size_t> sizes_;  // of the batches in values_
  std::unordered_map<uint32_t, int64_t> distinct_;
  Histogram* histogram_;
};

}  // namespace quant

#endif  // AMCT_QUANT_HISTOGRAM_HPP_
