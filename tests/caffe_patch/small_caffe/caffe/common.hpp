// Checks that throw, a log that is kept: the small part of a Caffe that the layers of the patch use, for tests.
#pragma once
#include <boost/shared_ptr.hpp>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace caffe {

using boost::shared_ptr;
using std::string;
using std::vector;

inline vector<string>& Log() {
  static vector<string> lines;
  return lines;
}

enum Severity { INFO, WARNING, FATAL };

// One line; a fatal one is an exception.
class Line {
 public:
  explicit Line(Severity severity) : severity_(severity) {}
  ~Line() noexcept(false) {
    if (severity_ == FATAL) throw std::runtime_error(text_.str());
    Log().push_back((severity_ == WARNING ? "warning: " : "") + text_.str());
  }
  std::ostringstream& stream() { return text_; }

 private:
  const Severity severity_;
  std::ostringstream text_;
};

#define LOG(severity) ::caffe::Line(::caffe::severity).stream()
#define LOG_IF(severity, condition) \
  if (!(condition)) {               \
  } else /* NOLINT */               \
    LOG(severity)
#define CHECK(condition) \
  if (condition) {       \
  } else /* NOLINT */    \
    LOG(FATAL)
#define CHECK_EQ(one, other) CHECK((one) == (other))
#define CHECK_GT(one, other) CHECK((one) > (other))
#define CHECK_LT(one, other) CHECK((one) < (other))

#define INSTANTIATE_CLASS(name) \
  template class name<float>;   \
  template class name<double>

}  // namespace caffe
