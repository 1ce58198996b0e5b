// What the layers that round in training have in common: the record that the last of them writes in the TEST phase.
#ifndef CAFFE_UTIL_AMCT_RETRAINING_HPP_
#define CAFFE_UTIL_AMCT_RETRAINING_HPP_

#include <boost/shared_ptr.hpp>
#include <string>
#include <vector>

#include "caffe/proto/caffe.pb.h"

namespace caffe {
namespace amct {

class Rounding {
 public:
  virtual ~Rounding() {}
  // The name of the layer, and of that whose data or weights it rounds.
  virtual const std::string& rounding_name() const = 0;
  virtual const std::string& object_layer() const = 0;
  // Put its factors into the entry of that layer.
  virtual void AddFactors(SingleLayerRecord* entry) = 0;
};

// The rounding layers of one net in the TEST phase that write to one record.
class Retraining {
 public:
  // That of a net which is being built: layers join it until its first forward. An empty path: there is none.
  static boost::shared_ptr<Retraining> Join(const std::string& record, Rounding* layer);
  void Leave(Rounding* layer);

  // The last layer writes the factors of all, if one has changed.
  void Report(Rounding* layer);

 private:
  explicit Retraining(const std::string& record) : record_(record), is_running_(false) {}

  const std::string record_;
  std::vector<Rounding*> layers_;
  bool is_running_;
  std::string written_;
};

}  // namespace amct
}  // namespace caffe

#endif  // CAFFE_UTIL_AMCT_RETRAINING_HPP_
