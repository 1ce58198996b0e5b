#include "histogram.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace quant {

namespace {

const int kMantissa = 23;
const uint32_t kSign = 1u << 31;
const size_t kExactLimit = 1 << 16;
const size_t kDistinctLimit = 4096;
const size_t kSamplingTarget = 1 << 18, kLeastSamples = 1 << 13;
const size_t kBlock = 512;
const size_t kRun = 16, kLargestInterval = 64, kProbedRuns = 64, kOdd = 37;

uint32_t PatternOf(float value) {
  uint32_t pattern;
  std::memcpy(&pattern, &value, sizeof(pattern));
  return pattern;
}

double ValueOf(uint32_t pattern) {
  if (pattern >= 0x7f800000u) return std::ldexp(1.0, 128);  // behind the largest number there is infinity
  float value;
  std::memcpy(&value, &pattern, sizeof(value));
  return value;
}

// Widen a range by values. Floats are ordered like whole numbers with a sign bit, whose maxima are vectorized.
void RangeOf(const float* values, size_t count, float* minimum, float* maximum) {
  int32_t least = std::numeric_limits<int32_t>::max(), largest = std::numeric_limits<int32_t>::min();
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(count - begin, kBlock);
    int32_t ordered[kBlock];
    std::memcpy(ordered, values + begin, size * sizeof(float));
    for (size_t i = 0; i < size; ++i) {
      const int32_t each = ordered[i] ^ ((ordered[i] >> 31) & 0x7fffffff);
      least = std::min(least, each);
      largest = std::max(largest, each);
    }
  }
  const int32_t ends[] = {least ^ ((least >> 31) & 0x7fffffff), largest ^ ((largest >> 31) & 0x7fffffff)};
  float range[2];
  std::memcpy(range, ends, sizeof(range));
  *minimum = std::min(*minimum, range[0]);
  *maximum = std::max(*maximum, range[1]);
}

typedef std::unordered_map<uint32_t, int64_t> DistinctValues;

// Add values to counts by distinct value; false, with some of them added, when there are too many.
bool CountDistinct(const float* values, size_t count, DistinctValues* found) {
  for (size_t i = 0; i < count; ++i) {
    ++(*found)[PatternOf(values[i])];
    if (found->size() > kDistinctLimit) return false;
  }
  return true;
}

// Whether values of the probed runs repeat often; neighbours may be equal, as pooling makes them.
bool FewDistinct(const float* values, size_t step, float bound) {
  uint32_t keys[2048] = {0};  // twice as many as probed values; zero is near zero, so it is none of them
  size_t number = 0, distinct = 0;
  for (size_t begin = 0; begin < kProbedRuns * step; begin += step) {
    for (size_t place = begin; place < begin + kRun; ++place) {
      const uint32_t pattern = PatternOf(values[place]);
      if (std::fabs(values[place]) <= bound) continue;
      if (place > begin && pattern == PatternOf(values[place - 1])) continue;
      ++number;
      uint32_t slot = pattern * 0x9E3779B1u >> 21;
      while (keys[slot] != 0 && keys[slot] != pattern) slot = (slot + 1) & 2047;
      distinct += keys[slot] == 0;
      keys[slot] = pattern;
    }
  }
  return 4 * distinct < 3 * number;
}

}  // namespace

size_t SamplingInterval(const float* values, size_t count, size_t enough) {
  if (count < 2 * enough) return 1;
  const size_t step = count / kProbedRuns - kOdd;
  float largest = 0;
  size_t number = 0;
  for (size_t begin = 0; begin < kProbedRuns * step; begin += step) {
    for (size_t i = begin; i < begin + kRun; ++i) largest = std::max(largest, std::fabs(values[i]));
  }
  const float bound = largest / 256;
  for (size_t begin = 0; begin < kProbedRuns * step; begin += step) {
    for (size_t i = begin; i < begin + kRun; ++i) number += std::fabs(values[i]) > bound;
  }
  const size_t matter = count * number / (kProbedRuns * kRun);
  size_t every = 1;
  while (every < kLargestInterval && matter >= 2 * every * enough) every *= 2;
  return every > 1 && FewDistinct(values, step, bound) ? 1 : every;
}

// -- Counts by top bits ------------------------------------------------------------------------------------------------

Histogram::Histogram(int bits, size_t enough)
    : shift_(kMantissa - (bits > 8 ? 11 : 9)),
      tail_(bits > 8 ? 4096 : 512),
      enough_(enough),
      total_(0),
      largest_weight_(1) {
  limits_[0] = limits_[1] = 1u << shift_;  // the bin of zero never belongs to a tail
}

inline void Histogram::Count(uint32_t pattern, int64_t weight) {
  std::vector<int64_t>& block = counts_[pattern >> kMantissa];
  const size_t size = static_cast<size_t>(1) << (kMantissa - shift_);
  if (block.empty()) block.resize(size);
  block[(pattern >> shift_) & (size - 1)] += weight;
}

inline void Histogram::Keep(uint32_t pattern) {
  const uint32_t magnitude = pattern & ~kSign;
  const int sign = pattern >= kSign;
  if (magnitude < limits_[sign]) return;
  outer_[sign].push_back(magnitude);
  if (outer_[sign].size() > 16 * tail_) TrimTails();
}

// Most blocks hold no value beyond the limits, which the largest magnitude of each sign tells at once: after a ReLU there
// is none of one sign, whose limit never rises.
void Histogram::KeepOuter(const float* values, size_t count) {
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(count - begin, kBlock);
    int32_t patterns[kBlock], positive = 0, negative = 0;
    std::memcpy(patterns, values + begin, size * sizeof(float));
    for (size_t i = 0; i < size; ++i) {
      const int32_t sign = patterns[i] >> 31;  // all bits, or none
      positive = std::max(positive, patterns[i] & ~sign);
      negative = std::max(negative, patterns[i] & sign & 0x7fffffff);
    }
    if (static_cast<uint32_t>(positive) < limits_[0] && static_cast<uint32_t>(negative) < limits_[1]) continue;
    for (size_t i = 0; i < size; ++i) Keep(patterns[i]);
  }
}

// Move each limit outwards to the next border of a bin beyond which there are not more values than a tail has.
void Histogram::TrimTails() {
  for (int sign = 0; sign < 2; ++sign) {
    std::vector<uint32_t>& outer = outer_[sign];
    if (outer.size() <= tail_) continue;
    std::nth_element(outer.begin(), outer.begin() + tail_, outer.end(), std::greater<uint32_t>());
    const uint32_t limit = ((outer[tail_] >> shift_) + 1) << shift_;
    limits_[sign] = std::max(limits_[sign], limit);
    outer.erase(std::remove_if(outer.begin(), outer.end(), [limit](uint32_t each) { return each < limit; }),
                outer.end());
  }
}

void Histogram::Add(const float* values, size_t count) {
  const size_t every = SamplingInterval(values, count, enough_);
  total_ += count;
  largest_weight_ = std::max(largest_weight_, every);
  if (every == 1) {
    for (size_t i = 0; i < count; ++i) Count(PatternOf(values[i]), 1);
  } else {
    // The run that is counted varies between groups, evenly spread by the golden ratio, so no channel is preferred.
    const size_t group = kRun * every;
    uint64_t fraction = 0;
    for (size_t begin = 0; begin + group <= count; begin += group, fraction += 0x9E3779B97F4A7C15ull) {
      const float* run = values + begin + ((fraction >> 32) * every >> 32) * kRun;
      for (size_t i = 0; i < kRun; ++i) Count(PatternOf(run[i]), every);
    }
  }
  KeepOuter(values, count);
}

void Histogram::AddCounted(const DistinctValues& counts) {
  for (DistinctValues::const_iterator each = counts.begin(); each != counts.end(); ++each) {
    total_ += each->second;
    Count(each->first, each->second);
    const bool is_outer = (each->first & ~kSign) >= limits_[each->first >= kSign];
    for (int64_t i = 0; is_outer && i < each->second; ++i) Keep(each->first);
  }
}

std::vector<Bin> Histogram::Bins() {
  TrimTails();
  std::vector<Bin> inner, bins;
  const uint32_t blocks = 256, size = 1u << (kMantissa - shift_);
  double counted = 0;
  for (int sign = 1; sign >= 0; --sign) {
    for (uint32_t step = 0; step < blocks; ++step) {  // from the outermost negative values inwards, then outwards
      const uint32_t block = sign ? blocks - 1 - step : step;
      const std::vector<int64_t>& counts = counts_[block + sign * blocks];
      for (uint32_t i = 0; i < counts.size(); ++i) {
        const uint32_t inside = sign ? size - 1 - i : i, place = block * size + inside;
        if (counts[inside] == 0 || place << shift_ >= limits_[sign]) continue;
        const double near = ValueOf(place << shift_), far = ValueOf((place + 1) << shift_);
        const Bin bin = {sign ? -far : near, sign ? -near : far, static_cast<double>(counts[inside])};
        inner.push_back(bin);
        counted += bin.count;
      }
    }
  }
  const size_t tails = outer_[0].size() + outer_[1].size();
  // The exact total corrects sampled counts.
  const double factor = largest_weight_ > 1 && !inner.empty() ? (total_ - static_cast<double>(tails)) / counted : 1.0;
  for (int sign = 0; sign < 2; ++sign) std::sort(outer_[sign].begin(), outer_[sign].end());
  for (size_t i = outer_[1].size(); i > 0; --i) {
    const double value = -ValueOf(outer_[1][i - 1]);
    bins.push_back(Bin{value, value, 1.0});
  }
  for (const Bin& bin : inner) bins.push_back(Bin{bin.low, bin.high, bin.count * factor});
  for (uint32_t each : outer_[0]) bins.push_back(Bin{ValueOf(each), ValueOf(each), 1.0});
  return bins;
}

// -- Values, distinct values or a histogram ----------------------------------------------------------------------------

Samples::Samples(int bits, int64_t batches)
    : bits_(bits),
      batches_(batches),
      enough_(std::max<size_t>(kSamplingTarget / (batches > 0 ? batches : 1), kLeastSamples)),
      is_exact_(true),
      is_first_(true),
      count_(0),
      minimum_(std::numeric_limits<float>::infinity()),
      maximum_(-std::numeric_limits<float>::infinity()),
      histogram_(nullptr) {}

Samples::~Samples() { delete histogram_; }

Histogram* Samples::MakeHistogram() {
  if (histogram_ == nullptr) {
    histogram_ = new Histogram(bits_, enough_);
    histogram_->AddCounted(distinct_);
    distinct_.clear();
  }
  return histogram_;
}

void Samples::Add(const float* values, size_t count) {
  // With so many batches of this size they will be counted anyway, so they are from the start.
  if (is_first_ && batches_ > 0 && count * static_cast<uint64_t>(batches_) > kExactLimit) is_exact_ = false;
  is_first_ = false;
  if (count == 0) return;
  count_ += count;
  RangeOf(values, count, &minimum_, &maximum_);
  if (is_exact_ && static_cast<size_t>(count_) <= kExactLimit) {
    values_.insert(values_.end(), values, values + count);
    sizes_.push_back(count);
    return;
  }
  if (is_exact_) {
    is_exact_ = false;
    const float* batch = values_.data();
    for (size_t size : sizes_) {
      AddCounted(batch, size);
      batch += size;
    }
    values_ = std::vector<float>();
  }
  AddCounted(values, count);
}

void Samples::AddCounted(const float* values, size_t count) {
  if (histogram_ != nullptr) return histogram_->Add(values, count);
  DistinctValues found;
  if (SamplingInterval(values, count, enough_) > 1 || !CountDistinct(values, count, &found)) {
    return MakeHistogram()->Add(values, count);
  }
  DistinctValues joined = distinct_;
  for (DistinctValues::const_iterator each = found.begin(); each != found.end(); ++each) {
    joined[each->first] += each->second;
  }
  if (joined.size() > kDistinctLimit) {
    MakeHistogram()->AddCounted(found);
  } else {
    distinct_.swap(joined);
  }
}

const std::vector<float>& Samples::Sorted() {
  std::sort(values_.begin(), values_.end());
  return values_;
}

std::vector<Bin> Samples::Bins() {
  std::vector<Bin> bins;
  if (histogram_ != nullptr) {
    bins = histogram_->Bins();
  } else {
    for (DistinctValues::const_iterator each = distinct_.begin(); each != distinct_.end(); ++each) {
      const double value = each->first >= kSign ? -ValueOf(each->first & ~kSign) : ValueOf(each->first);
      bins.push_back(Bin{value, value, static_cast<double>(each->second)});
    }
    std::sort(bins.begin(), bins.end(), [](const Bin& one, const Bin& other) { return one.low < other.low; });
  }
  for (Bin& bin : bins) {  // no bin reaches beyond the values that were seen
    bin.low = std::min(std::max(bin.low, static_cast<double>(minimum_)), static_cast<double>(maximum_));
    bin.high = std::min(std::max(bin.high, static_cast<double>(minimum_)), static_cast<double>(maximum_));
  }
  return bins;
}

}  // namespace quant
