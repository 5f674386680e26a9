#include <gtest/gtest.h>
#include <wyvern/dtype.hpp>

#include <cmath>
#include <limits>

namespace wyvern {
namespace {

struct Format {
  const char* name;
  std::uint8_t (*code)(float);
  float (*value)(std::uint8_t);
  int mantissa, bias;
  std::uint8_t largest;  ///< code of the largest finite number
};

class Float8Format : public ::testing::TestWithParam<Format> {};

TEST_P(Float8Format, CodesAreSignExponentMantissa) {
  const Format& f = GetParam();
  const int units = 1 << f.mantissa;
  for (int code = 0; code <= f.largest; ++code) {
    const int exponent = code / units, rest = code % units;
    const float value =
        exponent == 0
            ? std::ldexp(static_cast<float>(rest), 1 - f.bias - f.mantissa)
            : std::ldexp(static_cast<float>(units + rest), exponent - f.bias - f.mantissa);
    const auto positive = static_cast<std::uint8_t>(code);
    const auto negative = static_cast<std::uint8_t>(code | 0x80);
    EXPECT_EQ(f.value(positive), value) << code;
    EXPECT_EQ(f.value(negative), -value) << code;
    EXPECT_EQ(f.code(value), positive) << value;
    EXPECT_EQ(f.code(-value), negative) << value;
  }
  for (int code = f.largest + 1; code < 0x80; ++code)
    EXPECT_FALSE(std::isfinite(f.value(static_cast<std::uint8_t>(code)))) << code;
}

TEST_P(Float8Format, RoundsToNearestEvenAndSaturates) {
  const Format& f = GetParam();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int code = 0; code < f.largest; ++code) {
    const auto low = static_cast<std::uint8_t>(code), high = static_cast<std::uint8_t>(code + 1);
    const float middle = (f.value(low) + f.value(high)) / 2;  // exact
    EXPECT_EQ(f.code(middle), code % 2 == 0 ? low : high) << middle;
    EXPECT_EQ(f.code(std::nextafter(middle, 0.0F)), low) << middle;
    EXPECT_EQ(f.code(std::nextafter(middle, kInfinity)), high) << middle;
  }
  for (const float beyond :
       {f.value(f.largest) * 1.5F, std::numeric_limits<float>::max(), kInfinity}) {
    EXPECT_EQ(f.code(beyond), f.largest);
    EXPECT_EQ(f.code(-beyond), f.largest | 0x80);
  }
  EXPECT_EQ(f.code(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_TRUE(std::isnan(f.value(f.code(std::numeric_limits<float>::quiet_NaN()))));
}

INSTANTIATE_TEST_SUITE_P(, Float8Format,
                         ::testing::Values(Format{"e4m3", float_to_e4m3, e4m3_to_float, 3, 7, 0x7E},
                                           Format{"e5m2", float_to_e5m2, e5m2_to_float, 2, 15,
                                                  0x7B}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace wyvern
