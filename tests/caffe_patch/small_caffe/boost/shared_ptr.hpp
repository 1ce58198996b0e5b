#pragma once
#include <memory>

namespace boost {
using std::shared_ptr;
using std::weak_ptr;
}  // namespace boost
