// The library of quantization computes on float32; nets of Caffe may be of double.
#ifndef CAFFE_UTIL_AMCT_FLOATS_HPP_
#define CAFFE_UTIL_AMCT_FLOATS_HPP_

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "caffe/common.hpp"

namespace caffe {
namespace amct {

// Numbers to read as float32; those of a float blob are not copied.
class ReadFloats {
 public:
  ReadFloats(const float* values, size_t) : values_(values) {}
  ReadFloats(const double* values, size_t count) : copy_(values, values + count), values_(copy_.data()) {}
  const float* data() const { return values_; }

 private:
  std::vector<float> copy_;
  const float* values_;
};

// Numbers to write as float32; Done() hands them to a double blob.
class WriteFloats {
 public:
  WriteFloats(float* values, size_t) : values_(values), wide_(NULL) {}
  WriteFloats(double* values, size_t count) : copy_(count), values_(copy_.data()), wide_(values) {}
  float* data() { return values_; }
  void Done() {
    for (size_t i = 0; wide_ != NULL && i < copy_.size(); ++i) wide_[i] = copy_[i];
  }

 private:
  std::vector<float> copy_;
  float* values_;
  double* wide_;
};

// The decimal number that was written into a prototxt: 0.7, and not the float32 next to it.
inline double Decimal(float value) {
  char text[40];
  for (int digits = 6; digits <= 9; ++digits) {
    snprintf(text, sizeof(text), "%.*g", digits, value);
    if (strtof(text, NULL) == value) break;
  }
  return strtod(text, NULL);
}

}  // namespace amct
}  // namespace caffe

#endif  // CAFFE_UTIL_AMCT_FLOATS_HPP_
