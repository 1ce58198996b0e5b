#pragma once
#include <string>
#include <vector>

#include "caffe/common.hpp"
#include "caffe/proto/caffe.pb.h"

namespace caffe {

// Numbers and their gradients, each in memory that several blobs may share.
template <typename Dtype>
class Blob {
 public:
  Blob() : data_(new vector<Dtype>()), diff_(new vector<Dtype>()) {}
  explicit Blob(const vector<int>& shape) : Blob() { Reshape(shape); }

  void Reshape(const vector<int>& shape) {
    shape_ = shape;
    if (data_->size() < static_cast<size_t>(count())) data_.reset(new vector<Dtype>(count()));
    if (diff_->size() < static_cast<size_t>(count())) diff_.reset(new vector<Dtype>(count()));
  }
  void ReshapeLike(const Blob& other) { Reshape(other.shape_); }
  const vector<int>& shape() const { return shape_; }
  int shape(int axis) const { return shape_.at(axis < 0 ? axis + shape_.size() : axis); }
  int num_axes() const { return shape_.size(); }
  int count(int begin = 0) const { return count(begin, num_axes()); }
  int count(int begin, int end) const {
    int product = 1;
    for (int i = begin; i < end; ++i) product *= shape_.at(i);
    return product;
  }
  string shape_string() const {
    std::ostringstream text;
    for (int size : shape_) text << size << " ";
    text << "(" << count() << ")";
    return text.str();
  }

  const Dtype* cpu_data() const { return data_->data(); }
  const Dtype* cpu_diff() const { return diff_->data(); }
  Dtype* mutable_cpu_data() { return data_->data(); }
  Dtype* mutable_cpu_diff() { return diff_->data(); }
  void ShareData(const Blob& other) {
    CHECK_EQ(count(), other.count()) << "another count";
    data_ = other.data_;
  }
  void ShareDiff(const Blob& other) {
    CHECK_EQ(count(), other.count()) << "another count";
    diff_ = other.diff_;
  }
  void CopyFrom(const Blob& source, bool copy_diff = false, bool reshape = false) {
    if (reshape) ReshapeLike(source);
    *(copy_diff ? diff_ : data_) = *(copy_diff ? source.diff_ : source.data_);
  }
  void ToProto(BlobProto* proto, bool = false) const {
    proto->Clear();
    for (int size : shape_) proto->mutable_shape()->add_dim(size);
    for (int i = 0; i < count(); ++i) proto->add_data((*data_)[i]);
  }

 private:
  vector<int> shape_;
  shared_ptr<vector<Dtype> > data_, diff_;
};

}  // namespace caffe
