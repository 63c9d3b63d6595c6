#include "core/numbers.h"

#include <locale.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace ddl {
namespace {

locale_t Plain() {
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  return plain;
}

}  // namespace

std::string Format(const char* format, ...) {
  char text[512];
  const locale_t before = uselocale(Plain());  // of this thread
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  uselocale(before);
  return std::string(text, std::min<size_t>(length, sizeof(text) - 1));
}

double ReadNumber(const char* text, char** end) { return strtod_l(text, end, Plain()); }

}  // namespace ddl
