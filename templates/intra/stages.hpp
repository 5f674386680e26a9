// Stages inside a chunk up to W and U.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition scaled_dot_kkt{
    "scaled_dot_kkt", "A = strictly lower part of beta_r exp(G_r - G_s) k_r . k_s, per chunk.",
    {tensor::k,
     tensor::beta,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::A.out()},
    {{tunable::BT, tunable::BT, constant::K}}};

inline constexpr StageDefinition solve_tril{
    "solve_tril", "Tinv = (I + A)^-1, per chunk.",
    {tensor::A,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::Tinv.out()},
    {{tunable::BT, tunable::BT, tunable::BT}}};

inline constexpr StageDefinition recompute_w_u{
    "recompute_w_u", "W = Tinv diag(beta) (exp(G) K) and U = Tinv diag(beta) V, per chunk.",
    {tensor::k,
     tensor::v,
     tensor::beta,
     tensor::Tinv,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::w.out(),
     tensor::u.out()},
    {{tunable::BT, constant::K, tunable::BT}, {tunable::BT, constant::V, tunable::BT}}};

inline constexpr StageDefinition kda_intra{
    "kda_intra", "Aqk = lower part of q_r . exp(Gk_r - Gk_s) k_s, A the same of beta_r k_r (erase_r k_r), per chunk.",
    {tensor::q,
     tensor::k,
     tensor::beta.when({!constant::ERASE_WRITE}),
     tensor::erase,
     tensor::Gk,
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::Aqk.out(),
     tensor::A.out()},
    // Each channel has its own decay, so rows are scaled anew for each block of the product.
    {{tunable::BT, tunable::BT, constant::K, 12}}};

inline constexpr StageDefinition kda_recompute_w_u{
    "kda_recompute_w_u", "W = Tinv (beta exp(Gk) K), U = Tinv (beta V), or with erase and write in beta's place; decayed q and k.",
    {tensor::q,
     tensor::k,
     tensor::v,
     tensor::beta.when({!constant::ERASE_WRITE}),
     tensor::erase,
     tensor::write,
     tensor::Tinv,
     tensor::Gk,
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::w.out(),
     tensor::qg.out(),
     tensor::kg.out(),
     tensor::u.out()},
    {{tunable::BT, constant::K, tunable::BT}, {tunable::BT, constant::V, tunable::BT}}};
// clang-format on

}  // namespace wyvern::stages
