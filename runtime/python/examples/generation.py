"""A prompt in one call, then token by token: the state that the one leaves the other takes."""

import torch

import wyvern

PROMPT, GENERATED, HEADS, DIM = 100, 5, 2, 32


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (1, PROMPT + GENERATED, HEADS)
    q, k, v = (torch.randn(*shape, DIM, device=device) for _ in range(3))
    g, beta = -torch.rand(shape, device=device), torch.rand(shape, device=device)
    everything = (q, k, v, g, beta)

    with torch.no_grad():
        whole, _ = wyvern.ops.chunk_gated_delta_rule(*everything, use_qk_l2norm_in_kernel=True)
        o, state = wyvern.ops.chunk_gated_delta_rule(
            *(x[:, :PROMPT] for x in everything),
            use_qk_l2norm_in_kernel=True,
            output_final_state=True,
        )
        for t in range(PROMPT, PROMPT + GENERATED):
            q_t, k_t, v_t, g_t, beta_t = (x[:, t : t + 1] for x in everything)
            o, state = wyvern.ops.fused_recurrent_gated_delta_rule(
                q_t,
                k_t,
                v_t,
                g=g_t,
                beta=beta_t,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            difference = (o - whole[:, t : t + 1]).abs().max().item()
            print(f"token {t}: differs from the whole sequence's by at most {difference:.1e}")
            assert difference < 1e-4


if __name__ == "__main__":
    main()
