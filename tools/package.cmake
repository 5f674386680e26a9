# cmake --install: the wyvern command, the shared library with its public headers, the plugin, and a
# CMake package whose target wyvern::runtime is all that an outside project links; one without C++
# links wyvern::c.
include(CMakePackageConfigHelpers)

# One shared library out of the rooms' objects. SQLite is inside and hidden; Wyvern's own symbols
# are visible where exports.map says so.
set(objects $<TARGET_OBJECTS:wyvern_base> $<TARGET_OBJECTS:wyvern_templates>
            $<TARGET_OBJECTS:wyvern_compiler> $<TARGET_OBJECTS:wyvern_cache>
            $<TARGET_OBJECTS:wyvern_runtime>)
add_library(wyvern_shared SHARED ${objects})
target_link_libraries(wyvern_shared PRIVATE wyvern_options wyvern_sqlite ${CMAKE_DL_LIBS})
target_link_options(wyvern_shared PRIVATE
                    -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/exports.map)
set_target_properties(wyvern_shared PROPERTIES
                      OUTPUT_NAME wyvern EXPORT_NAME c VERSION ${PROJECT_VERSION}
                      SOVERSION ${PROJECT_VERSION_MAJOR}
                      LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/exports.map)
target_include_directories(wyvern_shared INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
# What the C++ headers need besides, which a project of no C++ compiler could not satisfy.
add_library(wyvern_shared_cpp INTERFACE)
set_target_properties(wyvern_shared_cpp PROPERTIES EXPORT_NAME runtime)
target_link_libraries(wyvern_shared_cpp INTERFACE wyvern_shared)
target_compile_features(wyvern_shared_cpp INTERFACE cxx_std_20)

# The same for Python's wheel: the C API alone, for older C libraries than this machine's.
add_library(wyvern_wheel_library SHARED ${objects})
target_link_libraries(wyvern_wheel_library PRIVATE wyvern_options wyvern_sqlite ${CMAKE_DL_LIBS})
wyvern_portable(wyvern_wheel_library)
wyvern_portable_exports(wyvern_wheel_library)
set_target_properties(wyvern_wheel_library PROPERTIES
                      OUTPUT_NAME wyvern SOVERSION ${PROJECT_VERSION_MAJOR}
                      LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/wheel)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/wyvern)
install(TARGETS wyvern RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS wyvern_shared wyvern_shared_cpp EXPORT wyvern
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_COMPONENT Development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/runtime/base/include/wyvern
                  ${PROJECT_SOURCE_DIR}/templates/include/wyvern
                  ${PROJECT_SOURCE_DIR}/runtime/include/wyvern
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} PATTERN sha256.hpp EXCLUDE)
# The cache is part of the API: RuntimeOptions takes one.
install(FILES ${PROJECT_SOURCE_DIR}/cache/cache.hpp
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/wyvern)
# Manual page and completions are what the command says of itself.
set(help ${CMAKE_CURRENT_BINARY_DIR}/help)
add_custom_command(
  OUTPUT ${help}/wyvern.1 ${help}/wyvern ${help}/_wyvern ${help}/wyvern.fish
  COMMAND ${CMAKE_COMMAND} -E make_directory ${help}
  COMMAND $<TARGET_FILE:wyvern> manual > ${help}/wyvern.1
  COMMAND $<TARGET_FILE:wyvern> completion bash > ${help}/wyvern
  COMMAND $<TARGET_FILE:wyvern> completion zsh > ${help}/_wyvern
  COMMAND $<TARGET_FILE:wyvern> completion fish > ${help}/wyvern.fish
  DEPENDS wyvern)
add_custom_target(wyvern_help ALL DEPENDS ${help}/wyvern.1)
install(FILES ${help}/wyvern.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${help}/wyvern DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${help}/_wyvern DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES ${help}/wyvern.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
install(FILES ${PROJECT_SOURCE_DIR}/tools/schemas.json DESTINATION ${CMAKE_INSTALL_DATADIR}/wyvern)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/cache/packs DESTINATION ${CMAKE_INSTALL_DATADIR}/wyvern)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT wyvern NAMESPACE wyvern:: FILE wyvern-targets.cmake DESTINATION ${package})
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/wyvern-config.cmake
     "include(\${CMAKE_CURRENT_LIST_DIR}/wyvern-targets.cmake)\n")
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/wyvern-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/wyvern-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/wyvern-config-version.cmake
        DESTINATION ${package})
