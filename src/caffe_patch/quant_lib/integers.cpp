// The integers of weights that were rounded and dequantized.
//
// A fake-quant file holds integer * scale, rounded to float32, but not the factors. The integers follow from the
// values. Several neighbouring scales can give the same values: a bias, which is whole steps too, tells which it was.
#include <algorithm>
#include <limits>
#include <vector>

#include "internal.hpp"
#include "quant.hpp"

using std::vector;

namespace {

const int kLargest = 127;
const int kNeighbours = 2;  // the scale lies within so many float32 steps of (largest weight) / (its integer)

// Rows of integers, and the scales that give the values of each row, ascending.
struct FoundGrid {
  vector<int8_t> integers;
  vector<vector<float> > scales;
};

float StepOf(float scale, float scale_data) {
  return static_cast<float>(static_cast<double>(scale) * static_cast<double>(scale_data));
}

int32_t BiasSteps(float bias, float step) {
  const double steps = std::nearbyint(static_cast<double>(bias) / static_cast<double>(step));
  const double low = std::numeric_limits<int32_t>::min(), high = std::numeric_limits<int32_t>::max();
  return static_cast<int32_t>(std::min(std::max(steps, low), high));
}

bool IsZero(const int8_t* integers, size_t count) {
  return std::all_of(integers, integers + count, [](int8_t each) { return each == 0; });
}

// The scales with which all values are whole steps and the largest magnitude is this integer; none: they are not.
vector<float> ScalesFor(const float* values, size_t count, float bound, int largest) {
  const float nearest = bound / static_cast<float>(largest);
  vector<float> scales;
  float low = nearest;
  for (int i = 0; i < kNeighbours; ++i) low = std::nextafter(low, 0.0f);
  for (int i = -kNeighbours; i <= kNeighbours; ++i, low = std::nextafter(low, FLT_MAX)) scales.push_back(low);
  for (size_t i = 0; i < count && !scales.empty(); ++i) {
    const float steps = std::nearbyint(values[i] / nearest), value = values[i];
    if (steps > kLargest) return vector<float>();
    scales.erase(std::remove_if(scales.begin(), scales.end(), [=](float each) { return steps * each != value; }),
                 scales.end());
  }
  return scales;
}

// The grid of each row, whose largest magnitude is the first of these integers that fits.
bool FindGrid(const float* rows, size_t row_count, size_t row_size, const vector<int>& largest, FoundGrid* grid) {
  grid->integers.assign(row_count * row_size, 0);
  grid->scales.assign(row_count, vector<float>(1, 1.0f));  // that of zeros
  for (size_t row = 0; row < row_count; ++row) {
    const float* values = rows + row * row_size;
    float bound = 0;
    for (size_t i = 0; i < row_size; ++i) bound = std::max(bound, std::fabs(values[i]));
    if (bound == 0) continue;
    size_t place = 0;
    vector<float> scales;
    for (; place < largest.size() && scales.empty(); ++place) {
      scales = ScalesFor(values, row_size, bound, largest[place]);
    }
    if (scales.empty()) return false;
    const float nearest = bound / static_cast<float>(largest[place - 1]);
    for (size_t i = 0; i < row_size; ++i) {
      grid->integers[row * row_size + i] = static_cast<int8_t>(std::nearbyint(values[i] / nearest));
    }
    grid->scales[row] = scales;
  }
  return true;
}

// Whether the biases of some rows are whole steps with this scale; zeros give their bias with any scale.
bool BiasesFit(const FoundGrid& grid, const float* bias, size_t first, size_t last, size_t row_size, float scale,
               float scale_data) {
  for (size_t row = first; row < last; ++row) {
    const float step = StepOf(scale, scale_data);
    const float back = static_cast<float>(static_cast<double>(BiasSteps(bias[row], step)) * static_cast<double>(step));
    if (back != bias[row] && !IsZero(grid.integers.data() + row * row_size, row_size)) return false;
  }
  return true;
}

// Of the possible scales the smallest with which every bias is whole; false if there is none.
bool ChooseScales(const FoundGrid& grid, size_t row_count, size_t row_size, const float* bias, float scale_data,
                  float* scales) {
  const size_t scale_count = grid.scales.size();
  for (size_t i = 0; i < scale_count; ++i) {
    const size_t first = scale_count == 1 ? 0 : i, last = scale_count == 1 ? row_count : i + 1;
    bool is_found = false;
    for (size_t j = 0; j < grid.scales[i].size() && !is_found; ++j) {
      scales[i] = grid.scales[i][j];
      is_found = bias == nullptr || BiasesFit(grid, bias, first, last, row_size, scales[i], scale_data);
    }
    if (!is_found) return false;
  }
  return true;
}

}  // namespace

int quant_find_integers(const float* rows, size_t row_count, size_t row_size, const float* bias, float scale_data,
                        int8_t* integers, float* scales, size_t* scale_count) {
  const size_t count = row_count * row_size;
  bool is_finite = true;
  for (size_t i = 0; i < count; ++i) is_finite &= std::fabs(rows[i]) <= FLT_MAX;
  for (size_t i = 0; bias != nullptr && i < row_count; ++i) is_finite &= std::fabs(bias[i]) <= FLT_MAX;
  if (!is_finite) return quant::Fail("the weights or biases hold NaN or infinity");
  const vector<int> usual = {kLargest, kLargest + 1};
  vector<int> others, all(usual);
  for (int i = 1; i < kLargest; ++i) others.push_back(i);
  all.insert(all.end(), others.begin(), others.end());
  const struct {
    bool is_whole;  // one scale for all rows
    const vector<int>& largest;
  } trials[] = {{true, usual}, {false, usual}, {true, others}, {false, all}};
  FoundGrid grid;
  for (const auto& trial : trials) {
    const size_t own_count = trial.is_whole ? 1 : row_count, own_size = trial.is_whole ? count : row_size;
    if (!FindGrid(rows, own_count, own_size, trial.largest, &grid)) continue;
    if (!ChooseScales(grid, row_count, row_size, bias, scale_data, scales)) continue;
    std::copy(grid.integers.begin(), grid.integers.end(), integers);
    *scale_count = own_count;
    return 0;
  }
  return quant::Fail("the weights are on no grid of 8 bits");
}

void quant_sum_steps(const int8_t* integers, size_t row_count, size_t row_size, const float* scales,
                     size_t scale_count, const float* bias, float scale_data, int32_t* bias_steps, float* steps) {
  for (size_t row = 0; row < row_count; ++row) {
    steps[row] = StepOf(scales[scale_count == 1 ? 0 : row], scale_data);
    if (bias == nullptr) continue;
    const bool is_zero = IsZero(integers + row * row_size, row_size);
    bias_steps[row] = is_zero ? 1 : BiasSteps(bias[row], steps[row]);
    if (is_zero) steps[row] = bias[row];
  }
}
