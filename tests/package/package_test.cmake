# Installs the build into a fresh prefix, moves the prefix, and builds and runs outside projects that
# find the package there. Variables: BUILD, SOURCE (this folder), EXAMPLES (runtime/examples), WORK
# (scratch), CXX.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${what} failed (${status}):\n${text}")
  endif()
  set(output "${text}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
run("installing" ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/prefix)  # a package that remembers its first place fails below
run("configuring the app" ${CMAKE_COMMAND} -S ${SOURCE}/app -B ${WORK}/build -G Ninja
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run("building the app" ${CMAKE_COMMAND} --build ${WORK}/build)
run("the app" ${WORK}/build/app ${WORK}/cache)
run("configuring the examples" ${CMAKE_COMMAND} -S ${EXAMPLES} -B ${WORK}/examples -G Ninja
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run("building the examples" ${CMAKE_COMMAND} --build ${WORK}/examples)
run("an example" ${CMAKE_COMMAND} -E env WYVERN_CACHE_DIR=${WORK}/cache
    ${WORK}/examples/example_decode cpu)
run("configuring the app in C" ${CMAKE_COMMAND} -S ${SOURCE}/c_app -B ${WORK}/c_app -G Ninja
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix -DEXAMPLE=${EXAMPLES}/c_api.c)
run("building the app in C" ${CMAKE_COMMAND} --build ${WORK}/c_app)
run("the app in C" ${CMAKE_COMMAND} -E env WYVERN_CACHE_DIR=${WORK}/cache ${WORK}/c_app/c_app cpu)
if(NOT EXISTS ${WORK}/prefix/share/doc/wyvern/LICENSE)
  message(FATAL_ERROR "the package has no LICENSE")
endif()
run("the installed command" ${CMAKE_COMMAND} -E env WYVERN_CACHE_DIR=${WORK}/cache
    ${WORK}/prefix/bin/wyvern compile fwd_o --arch native-cpu --emit object -o ${WORK}/fwd_o.so)

# A pack among the installed ones answers the installed command, and what links the library.
set(pack ${WORK}/prefix/share/wyvern/packs/test.jsonl)
set(in_cache ${CMAKE_COMMAND} -E env WYVERN_CACHE_DIR=${WORK})
set(tune ${WORK}/prefix/bin/wyvern tune --manifest ${SOURCE}/problem.jsonl --device cpu)
run("tuning for a pack" ${in_cache}/tuned ${tune} --budget 0.1s)
run("exporting a pack" ${in_cache}/tuned ${WORK}/prefix/bin/wyvern cache export -o ${pack})
run("the app with a pack" ${WORK}/build/app ${WORK}/untuned exact)
run("the installed command with a pack" ${in_cache}/untuned ${tune} --missing --json)
if(NOT output MATCHES "\"known\": *1")
  message(FATAL_ERROR "the installed command does not find the installed pack: ${output}")
endif()

# What the command says of itself, and what describes its documents.
foreach(file man/man1/wyvern.1 bash-completion/completions/wyvern zsh/site-functions/_wyvern
        fish/vendor_completions.d/wyvern.fish wyvern/schemas.json wyvern/packs/README.md)
  if(NOT EXISTS ${WORK}/prefix/share/${file})
    message(FATAL_ERROR "the package has no share/${file}")
  endif()
  file(SIZE ${WORK}/prefix/share/${file} bytes)
  if(bytes LESS 100)
    message(FATAL_ERROR "share/${file} has ${bytes} bytes")
  endif()
endforeach()

# Nothing but Wyvern's own API is visible.
find_program(nm NAMES nm REQUIRED)
file(GLOB library ${WORK}/prefix/lib*/libwyvern.so ${WORK}/prefix/lib*/*/libwyvern.so)
execute_process(COMMAND ${nm} -D -C --defined-only ${library} OUTPUT_VARIABLE symbols
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[0-9a-f]+ [A-Zi] [^\n]+" lines "${symbols}")
if(NOT lines)
  message(FATAL_ERROR "no symbols were found in '${library}'")
endif()
foreach(line ${lines})
  if(NOT line MATCHES "wyvern")
    message(FATAL_ERROR "${library} shows the symbol ${line}")
  endif()
endforeach()
file(REMOVE_RECURSE ${WORK})
