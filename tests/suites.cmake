# Writes the CTests of a GoogleTest program: one for each of its test suites, as a process of its own
# for each case would take longer to start than most cases take. After building the program:
# cmake -DPROGRAM= -DOUTPUT= -DQUICK=filter -DSHARDS= -DTIMEOUT= -DENVIRONMENT= -P suites.cmake
#
# Cases that match QUICK (* all, none) are labelled `quick`. A suite with enough cases is split over
# SHARDS CTests, so that several processors share it; those of a GPU are not, which has one queue.
#
# COST says roughly how many seconds a long CTest takes: CTest begins with those that take longest, and
# in a new build folder it knows of no times.

# list_cases(OUTPUT filter): "suite.case" of each case that the filter admits, in the program's order.
function(list_cases output filter)
  execute_process(COMMAND ${PROGRAM} --gtest_list_tests --gtest_filter=${filter}
                  OUTPUT_VARIABLE text RESULT_VARIABLE result TIMEOUT 60)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${PROGRAM} --gtest_list_tests: ${result}\n${text}")
  endif()
  string(REGEX REPLACE " *# [^\n]*" "" text "${text}")  # values of parameters
  string(REPLACE "\n" ";" lines "${text}")
  set(cases "")
  foreach(line IN LISTS lines)
    if(line MATCHES "^  DISABLED_")
      continue()
    elseif(line MATCHES "^  (.+)$")
      list(APPEND cases "${suite}${CMAKE_MATCH_1}")
    elseif(line MATCHES "^[^ ]+\\.$")
      set(suite "${line}")
    endif()
  endforeach()
  set(${output} "${cases}" PARENT_SCOPE)
endfunction()

# add(NAME filter environment properties...)
function(add name filter environment)
  string(APPEND text "add_test([==[${name}]==] [==[${PROGRAM}]==] [==[--gtest_filter=${filter}]==])\n"
                     "set_tests_properties([==[${name}]==] PROPERTIES TIMEOUT ${TIMEOUT}")
  # Skipped is a CTest of which every case was, and none failed.
  string(APPEND text " SKIP_REGULAR_EXPRESSION [==[PASSED  \\] 0 tests\\.\n\\[  SKIPPED \\] [0-9]+ "
                     "tests?, listed below:\n(\\[  SKIPPED \\] [^\n]*\n)+$]==]")
  if(environment)
    string(APPEND text " ENVIRONMENT [==[${environment}]==]")
  endif()
  foreach(property IN LISTS ARGN)
    string(APPEND text " [==[${property}]==]")
  endforeach()
  set(text "${text})\n" PARENT_SCOPE)
endfunction()

if(NOT SHARDS)
  set(SHARDS 1)
endif()
set(text "")
list_cases(all "*")
set(quick_cases "")
if(NOT QUICK STREQUAL "none")
  list_cases(quick_cases "${QUICK}")
endif()
set(suites ${all})
list(TRANSFORM suites REPLACE "\\.[^.]*$" "")
list(REMOVE_DUPLICATES suites)
foreach(suite IN LISTS suites)
  string(REGEX REPLACE "([][+.*()^$])" "\\\\\\1" escaped "${suite}")
  set(own ${all})
  list(FILTER own INCLUDE REGEX "^${escaped}\\.")
  set(own_quick ${quick_cases})
  list(FILTER own_quick INCLUDE REGEX "^${escaped}\\.")
  list(LENGTH own count)
  list(LENGTH own_quick quick_count)
  if(quick_count EQUAL count)
    add("${suite}" "${suite}.*" "${ENVIRONMENT}" LABELS quick)
    continue()
  endif()
  set(filter "${suite}.*")
  if(own_quick)
    string(REPLACE ";" ":" own_quick "${own_quick}")
    add("${suite}.quick" "${own_quick}" "${ENVIRONMENT}" LABELS quick)
    string(APPEND filter "-${own_quick}")
  endif()
  if(suite MATCHES "^Gpu" OR count LESS SHARDS OR SHARDS EQUAL 1)
    add("${suite}" "${filter}" "${ENVIRONMENT}")
    continue()
  endif()
  math(EXPR last "${SHARDS} - 1")
  foreach(shard RANGE ${last})
    add("${suite}.shard${shard}" "${filter}"
        "GTEST_TOTAL_SHARDS=${SHARDS};GTEST_SHARD_INDEX=${shard};${ENVIRONMENT}" COST 60)
  endforeach()
endforeach()
file(WRITE ${OUTPUT} "${text}")
