# Writes OUTPUT: the report's page, style, script and CHARTS (Chart.js, may be empty) as texts. A
# string literal may be limited to 64 KiB, so a text is split into adjacent raw literals.
function(literals file result)
  set(text "")
  if(NOT file STREQUAL "")
    file(READ "${file}" text)
  endif()
  string(LENGTH "${text}" length)
  set(pieces "\"\"")
  set(start 0)
  while(start LESS length)
    string(SUBSTRING "${text}" ${start} 8000 piece)
    string(APPEND pieces "\nR\"wyvern(${piece})wyvern\"")
    math(EXPR start "${start} + 8000")
  endwhile()
  set(${result} "${pieces}" PARENT_SCOPE)
endfunction()

literals(${ROOT}/page.html page)
literals(${ROOT}/style.css style)
literals(${ROOT}/report.js script)
literals("${CHARTS}" charts)
file(WRITE ${OUTPUT}
"// Generated from tools/wyvern/report/ by embed.cmake.
#include \"tools/wyvern/report_assets.hpp\"

namespace wyvern::cli {
const std::string_view kReportPage = ${page};
const std::string_view kReportStyle = ${style};
const std::string_view kReportScript = ${script};
const std::string_view kReportCharts = ${charts};
}  // namespace wyvern::cli
")
