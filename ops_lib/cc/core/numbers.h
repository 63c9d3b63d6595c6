#ifndef DDL_CORE_NUMBERS_H_
#define DDL_CORE_NUMBERS_H_

#include <string>

namespace ddl {

// Numbers with a decimal point, as JSON and our settings have them. The C library's functions write
// and expect a comma once a script has called setlocale, as for German or French.

// What printf writes, of 511 bytes at most.
__attribute__((format(printf, 1, 2))) std::string Format(const char* format, ...);

// As std::strtod.
double ReadNumber(const char* text, char** end);

}  // namespace ddl

#endif  // DDL_CORE_NUMBERS_H_
