// IFMR. A percentile range of the data, widened to contain zero, is multiplied by each ratio of a range of ratios: both
// ends, or with an offset only the upper one. The first of the ratios with the least mean squared error is chosen.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "histogram.hpp"
#include "internal.hpp"
#include "quant.hpp"

using quant::Bin;
using quant::Fail;
using quant::Highest;
using quant::Lowest;
using std::vector;

struct quant_ifmr {
  explicit quant_ifmr(const quant_ifmr_settings& given) : settings(given), samples(given.bits, given.batches) {}

  const quant_ifmr_settings settings;
  quant::Samples samples;
};

namespace {

struct Candidate {
  double lower, upper, scale;
};

const size_t kMostUnmerged = 4096;

// The rank of a percentile, counted from the outermost value, which has rank 1.
int64_t RankOf(double percentile, int64_t count) {
  if (1 - percentile < FLT_EPSILON) return 1;
  return std::max<int64_t>(1, count - static_cast<int64_t>(percentile * count));
}

vector<Candidate> CandidatesFor(const quant_ifmr_settings& settings, double minimum, double maximum) {
  const int levels = Highest(settings.bits) - Lowest(settings.bits);
  const double end = settings.search_end, start = settings.search_start, step = settings.search_step;
  const double stride = start + step - start;  // as a sequence of floating point numbers is commonly computed
  const int64_t most = static_cast<int64_t>(std::ceil((end - start) / step));
  vector<Candidate> found;
  for (int64_t i = 0; i < most; ++i) {
    const double ratio = start + i * stride;
    if (ratio >= end - step * 1e-6) continue;
    if (settings.with_offset) {
      const double upper = ratio * maximum;
      found.push_back(Candidate{minimum, upper, (upper - minimum) / levels});
    } else {
      const double upper = ratio * std::max(maximum, -minimum);
      found.push_back(Candidate{-upper, upper, upper / Highest(settings.bits)});
    }
  }
  return found;
}

size_t LeastOf(const vector<double>& losses) { return std::min_element(losses.begin(), losses.end()) - losses.begin(); }

// -- Of all values: rounded in float32, summed in float64 --------------------------------------------------------------

vector<double> ExactLosses(const vector<float>& values, const vector<Candidate>& candidates) {
  vector<double> losses;
  for (const Candidate& candidate : candidates) {
    const float low = static_cast<float>(candidate.lower), high = static_cast<float>(candidate.upper);
    const float step = static_cast<float>(candidate.scale);
    double total = 0;
    for (float value : values) {
      const double error = quant::RoundSmall(std::min(std::max(value, low), high) / step) * step - value;
      total += error * error;
    }
    losses.push_back(total);
  }
  return losses;
}

// -- Of a histogram: integrated over each bin --------------------------------------------------------------------------

// The integral of (round(x) - x)^2 from 0 to x.
double RoundingErrorIntegral(double x) {
  const double nearest = std::nearbyint(x), rest = x - nearest;
  return nearest / 12 + rest * rest * rest / 3;
}

// The integral of x^2.
double SquareIntegral(double begin, double end) {
  return (end - begin) * (end * end + end * begin + begin * begin) / 3;
}

// The integral of the squared error over a bin that may reach beyond the range.
double BinError(const Bin& bin, const Candidate& candidate) {
  const double step = candidate.scale, bottom = candidate.lower, top = candidate.upper;
  const double kept_bottom = std::nearbyint(bottom / step) * step, kept_top = std::nearbyint(top / step) * step;
  double area = 0;
  if (bin.low < bottom) area += SquareIntegral(bin.low - kept_bottom, std::min(bin.high, bottom) - kept_bottom);
  if (bin.high > top) area += SquareIntegral(std::max(bin.low, top) - kept_top, bin.high - kept_top);
  const double begin = std::max(bin.low, bottom), end = std::min(bin.high, top);
  if (begin < end) {
    area += step * step * step * (RoundingErrorIntegral(end / step) - RoundingErrorIntegral(begin / step));
  }
  return area;
}

// Bins that every candidate rounds to zero have the same loss for all: they are left out. Close neighbours become one.
vector<Bin> BinsThatMatter(const vector<Bin>& bins, double least) {
  size_t below = 0;
  while (below < bins.size() && bins[below].low < -0.5 * least) ++below;
  size_t above = bins.size();
  while (above > below && bins[above - 1].high > 0.5 * least) --above;
  vector<Bin> kept(bins.begin(), bins.begin() + below);
  kept.insert(kept.end(), bins.begin() + above, bins.end());
  if (kept.size() <= kMostUnmerged) return kept;
  vector<Bin> merged;
  const double width = least / 8;
  double cell = 0;
  for (const Bin& bin : kept) {
    const double own = std::floor(bin.low / width);
    if (!merged.empty() && own == cell) {
      merged.back().high = bin.high;
      merged.back().count += bin.count;
    } else {
      merged.push_back(bin);
      cell = own;
    }
  }
  return merged;
}

// As RoundSmall, for doubles below 2^51.
inline double RoundWide(double x) {
  const double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  return (x + kMagic) - kMagic;
}

inline double WideIntegral(double x) {
  const double nearest = RoundWide(x), rest = x - nearest;
  return nearest * (1.0 / 12) + rest * rest * rest * (1.0 / 3);
}

// The integral over bins inside of the range, in steps: four sums at once, which compilers vectorize.
double InnerLoss(const vector<double>& low, const vector<double>& high, const vector<double>& density, size_t first,
                 size_t last, double inverse) {
  double sums[4] = {0, 0, 0, 0};
  size_t place = first;
  for (; place + 4 <= last; place += 4) {
    for (int i = 0; i < 4; ++i) {
      sums[i] += density[place + i] * (WideIntegral(high[place + i] * inverse) - WideIntegral(low[place + i] * inverse));
    }
  }
  for (; place < last; ++place) {
    sums[0] += density[place] * (WideIntegral(high[place] * inverse) - WideIntegral(low[place] * inverse));
  }
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

vector<double> BinnedLosses(const vector<Bin>& bins, const vector<Candidate>& candidates) {
  double least = candidates[0].scale;
  for (const Candidate& candidate : candidates) least = std::min(least, candidate.scale);
  vector<Bin> points;
  vector<double> low, high, density;
  for (const Bin& bin : BinsThatMatter(bins, least)) {
    if (bin.low < bin.high) {
      low.push_back(bin.low);
      high.push_back(bin.high);
      density.push_back(bin.count / (bin.high - bin.low));
    } else {
      points.push_back(bin);
    }
  }
  vector<double> losses;
  for (const Candidate& candidate : candidates) {
    const size_t first = std::lower_bound(low.begin(), low.end(), candidate.lower) - low.begin();
    const size_t last = std::upper_bound(high.begin(), high.end(), candidate.upper) - high.begin();
    const double cube = candidate.scale * candidate.scale * candidate.scale;
    double total = 0;
    if (first < last) total = InnerLoss(low, high, density, first, last, 1 / candidate.scale) * cube;
    for (size_t i = 0; i < std::min(first, low.size()); ++i) {
      total += density[i] * BinError(Bin{low[i], high[i], 0}, candidate);
    }
    for (size_t i = std::max(first, last); i < low.size(); ++i) {
      total += density[i] * BinError(Bin{low[i], high[i], 0}, candidate);
    }
    for (const Bin& point : points) {
      const double inside = std::min(std::max(point.low, candidate.lower), candidate.upper);
      const double error = RoundWide(inside / candidate.scale) * candidate.scale - point.low;
      total += point.count * error * error;
    }
    losses.push_back(total);
  }
  return losses;
}

// The value of a rank, interpolated within its bin; bins are taken from the outermost inwards.
double ValueAtRank(const vector<Bin>& bins, bool from_above, int64_t rank) {
  double below = 0;
  size_t place = 0;
  const size_t last = bins.size() - 1;
  while (place < last && below + bins[from_above ? last - place : place].count < rank) {
    below += bins[from_above ? last - place : place].count;
    ++place;
  }
  const Bin& bin = bins[from_above ? last - place : place];
  const double near = from_above ? bin.high : bin.low, far = from_above ? bin.low : bin.high;
  if (rank == 1) return near;
  return near + (far - near) * (rank - below - 0.5) / bin.count;
}

}  // namespace

quant_ifmr* quant_ifmr_new(const quant_ifmr_settings* settings) {
  const quant_ifmr_settings& given = *settings;
  std::string wrong;
  if (given.bits < 2 || given.bits > 16) wrong = "num_bits_d: expected 2..16, got " + std::to_string(given.bits);
  if (!(given.search_start > 0 && given.search_start < given.search_end)) {
    wrong = "search_range: expected 0 < start < end, got " + quant::Text(given.search_start) + ".." +
            quant::Text(given.search_end);
  }
  if (!(given.search_step > 0)) wrong = "search_step: expected above 0, got " + quant::Text(given.search_step);
  for (double each : {given.max_percentile, given.min_percentile}) {
    if (!(each > 0.5 && each <= 1)) wrong = "percentiles: expected (0.5, 1], got " + quant::Text(each);
  }
  if (!wrong.empty()) {
    Fail(wrong);
    return nullptr;
  }
  return new quant_ifmr(given);
}

int quant_ifmr_observe(quant_ifmr* observer, const float* x, size_t count) {
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i) wrong += !(std::fabs(x[i]) <= FLT_MAX);
  if (wrong > 0) {
    size_t nan = 0;
    for (size_t i = 0; i < count; ++i) nan += x[i] != x[i];
    const size_t infinite = wrong - nan;
    return Fail("the activation holds " + std::to_string(nan) + " NaN and " + std::to_string(infinite) +
                " infinite values among " + std::to_string(count) +
                "; look for a diverged layer or broken input data, or leave this layer in float");
  }
  observer->samples.Add(x, count);
  return 0;
}

int quant_ifmr_find(quant_ifmr* observer, quant_ifmr_result* result) {
  const quant_ifmr_settings& settings = observer->settings;
  if (observer->samples.count() == 0) return Fail("no activation values were observed");
  const bool is_exact = observer->samples.is_exact();
  vector<float> values;
  vector<Bin> bins;
  double minimum, maximum;
  if (is_exact) {
    values = observer->samples.Sorted();
    minimum = values[RankOf(settings.min_percentile, values.size()) - 1];
    maximum = values[values.size() - RankOf(settings.max_percentile, values.size())];
  } else {
    bins = observer->samples.Bins();
    double total = 0;
    for (const Bin& bin : bins) total += bin.count;
    const int64_t count = std::llrint(total);
    minimum = ValueAtRank(bins, false, RankOf(settings.min_percentile, count));
    maximum = ValueAtRank(bins, true, RankOf(settings.max_percentile, count));
  }
  minimum = std::min(0.0, minimum);
  maximum = std::max(0.0, maximum);
  const vector<Candidate> candidates = CandidatesFor(settings, minimum, maximum);
  double largest = 0, least = candidates[0].scale;
  for (const Candidate& each : candidates) {
    largest = std::max(largest, each.scale);
    least = std::min(least, each.scale);
  }
  size_t best = 0;
  if (largest >= quant::kSmallestScale && least <= quant::kLargestScale) {  // otherwise a search is useless
    best = LeastOf(is_exact ? ExactLosses(values, candidates) : BinnedLosses(bins, candidates));
  }
  double lower = candidates[best].lower, upper = candidates[best].upper;
  if (!settings.with_offset) (-minimum > maximum ? upper : lower) = 0;
  if (quant_factors(lower, upper, settings.bits, settings.with_offset, &result->scale, &result->offset,
                    &result->near_zero)) {
    return 1;
  }
  const int64_t offset = result->offset;
  result->clip_min = static_cast<float>(Lowest(settings.bits) - offset) * result->scale;
  result->clip_max = static_cast<float>(Highest(settings.bits) - offset) * result->scale;
  return 0;
}

void quant_ifmr_free(quant_ifmr* observer) { delete observer; }
