#include "common/error.h"

#include <system_error>

#include "common/descriptors.h"

namespace ours {

// std::generic_category is used because strerror() is not thread-safe.
SystemError::SystemError(const std::string& what, int errno_value)
    : Error(what + ": " + std::generic_category().message(errno_value) + " (errno " + std::to_string(errno_value) +
            ")" + (is_lack_of_descriptors(errno_value) ? ". " + describe_descriptors() : "")) {}

}  // namespace ours
