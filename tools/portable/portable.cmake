# What goes into Python's wheels: linked so that it runs with glibc 2.28 (manylinux_2_28: RHEL 8,
# Debian 10, Ubuntu 18.10 and later) where it was built with a newer one, and with no other C++ library.
include_guard(GLOBAL)

# wyvern_portable(TARGET): the target needs the C library and libgcc_s, on x86-64 old ones too.
function(wyvern_portable target)
  if(WYVERN_SANITIZE)
    return()
  endif()
  target_link_options(${target} PRIVATE -static-libstdc++)
  if(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    return()
  endif()
  if(NOT TARGET wyvern_old_glibc)
    set(folder ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
    foreach(part glibc start)
      add_library(wyvern_old_${part} OBJECT EXCLUDE_FROM_ALL ${folder}/${part}.c)
      target_compile_options(wyvern_old_${part} PRIVATE -fno-builtin)
    endforeach()
  endif()
  get_target_property(type ${target} TYPE)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:wyvern_old_glibc>)
  if(type STREQUAL "EXECUTABLE")
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:wyvern_old_start>)
  endif()
  # Before glibc 2.34 these were no part of the C library.
  target_link_options(${target} PRIVATE
    -Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,--pop-state)
endfunction()

# wyvern_portable_exports(TARGET): the library exports what is named wyvern_*, and nothing of C++.
function(wyvern_portable_exports target)
  set(map ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/exports.map)
  target_link_options(${target} PRIVATE -Wl,--version-script=${map})
  set_target_properties(${target} PROPERTIES LINK_DEPENDS ${map})
endfunction()
