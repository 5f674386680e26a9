# wyvern_llvm_static: the same plugin with LLVM, Clang and LLD inside, for machines without them. It
# is made when it is asked for (Python's wheel wyvern-kernels-cpu), where their archives are installed.

# The packages' targets lead to the shared libraries; their archives are linked by path. All of them
# are offered, and the linker takes what is needed.
set(archives "")
foreach(target ${LLVM_AVAILABLE_LIBS} ${CLANG_EXPORTED_TARGETS} lldELF lldCommon)
  if(TARGET ${target})
    get_target_property(type ${target} TYPE)
    get_target_property(file ${target} LOCATION)
    if(type STREQUAL "STATIC_LIBRARY" AND EXISTS "${file}")
      list(APPEND archives ${file})
    endif()
  endif()
endforeach()
if(NOT archives MATCHES "libLLVMSupport" OR NOT archives MATCHES "libclangCodeGen")
  return()
endif()

# LLD initializes every target that LLVM was built with, for link-time optimization, which is not
# used here; those of other processors are a third of the whole.
set(others ${LLVM_TARGETS_TO_BUILD})
list(REMOVE_ITEM others ${LLVM_NATIVE_ARCH})
set(text "// Made by compiler/llvm/static_plugin.cmake.\nextern \"C\" {\n")
foreach(target ${others})
  foreach(part TargetInfo Target TargetMC AsmPrinter AsmParser)
    string(APPEND text "void LLVMInitialize${target}${part}();\n"
                       "void LLVMInitialize${target}${part}() {}\n")
  endforeach()
endforeach()
file(CONFIGURE OUTPUT other_targets.cpp CONTENT "${text}}\n" @ONLY)

wyvern_plugin(wyvern_llvm_static static_plugin.cpp ${CMAKE_CURRENT_BINARY_DIR}/other_targets.cpp)
wyvern_llvm_flags(wyvern_llvm_static)
find_library(WYVERN_ZSTD NAMES libzstd.a zstd)
find_library(WYVERN_TINFO NAMES libtinfo.a tinfo)
mark_as_advanced(WYVERN_ZSTD WYVERN_TINFO)
target_link_options(wyvern_llvm_static PRIVATE -s -Wl,--gc-sections -Wl,--as-needed
                    -Wl,--no-undefined)
target_link_libraries(wyvern_llvm_static PRIVATE -Wl,--start-group ${archives} -Wl,--end-group
                      ${WYVERN_ZSTD} ${WYVERN_TINFO} ZLIB::ZLIB Threads::Threads ${CMAKE_DL_LIBS})
include(${PROJECT_SOURCE_DIR}/tools/portable/portable.cmake)
wyvern_portable(wyvern_llvm_static)
set_target_properties(wyvern_llvm_static PROPERTIES
                      EXCLUDE_FROM_ALL ON
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/static)
