// A calibration: what the IFMR layers of one net with one record file have in common.
#ifndef CAFFE_UTIL_AMCT_CALIBRATION_HPP_
#define CAFFE_UTIL_AMCT_CALIBRATION_HPP_

#include <boost/shared_ptr.hpp>
#include <string>
#include <vector>

#include "caffe/proto/caffe.pb.h"
#include "caffe/util/quant.hpp"

namespace caffe {
namespace amct {

// One IFMR layer of a calibration.
class Watched {
 public:
  // Ends with an error if the options are wrong.
  Watched(const std::string& name, const IFMRParameter& options);
  ~Watched() { quant_ifmr_free(observer_); }

  const std::string& name() const { return name_; }
  const IFMRParameter& options() const { return options_; }
  // Whether as many batches were seen as are needed.
  bool is_complete() const { return batches_ >= static_cast<int>(options_.batch_num()); }

 private:
  friend class Calibration;
  Watched(const Watched&);
  void operator=(const Watched&);
  void Observe(const float* values, size_t count, const std::vector<int>& shape);
  void Find(quant_ifmr_result* result) const;
  std::string Failure() const;

  const std::string name_;
  const IFMRParameter options_;
  quant_ifmr* observer_;  // null where the factors are those of another layer
  std::vector<int> shape_;
  int batches_;
};

class Calibration {
 public:
  // That of a net which is being built: layers join it until its first forward.
  static boost::shared_ptr<Calibration> Join(const boost::shared_ptr<Watched>& layer);

  // A layer sees a batch. The last one of all writes the factors of all.
  void Observe(Watched* layer, const float* values, size_t count, const std::vector<int>& shape);

 private:
  explicit Calibration(const std::string& record) : record_(record), is_running_(false), written_(0) {}
  Watched* LeaderOf(Watched* layer) const;
  void Begin();
  void Write();
  void NoteProgress() const;

  const std::string record_;
  std::vector<boost::shared_ptr<Watched> > layers_;
  bool is_running_;
  size_t written_;  // so many layers are in the record
};

}  // namespace amct
}  // namespace caffe

#endif  // CAFFE_UTIL_AMCT_CALIBRATION_HPP_
