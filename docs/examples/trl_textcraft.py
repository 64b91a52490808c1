"""TRL's GRPOTrainer on the hub's TextCraft, over OpenEnv's socket.

pip install trl==1.16.0 openenv==0.10.0
python run.py envhub env=textcraft port=8080
python docs/examples/trl_textcraft.py http://127.0.0.1:8080/openenv/textcraft MODEL_FOLDER 2
"""

import sys
from typing import Any

import requests
import torch
from datasets import Dataset
from openenv import GenericEnvClient
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

TURNS, TURN_TOKENS = 3, 12


def play(item_id: str, client: Any, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return one episode: its tokens, the mask of sampled tokens, and its reward."""
    result = client.reset(item_id=item_id)
    prompt = tokenizer.encode(result.observation["text"] + "\n")
    tokens, chosen, logprobs = [*prompt], [], []
    mask: list[int] = []
    for _ in range(TURNS):
        asked = torch.tensor([tokens])
        out = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=TURN_TOKENS,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        action = out.sequences[0, len(tokens) :].tolist()
        chosen += action
        mask += [1] * len(action)
        scores = torch.stack(out.logits)[:, 0].log_softmax(-1)
        logprobs += scores[range(len(action)), action].tolist()
        text = tokenizer.decode(action, skip_special_tokens=True)
        result = client.step({"message": text})
        observed = tokenizer.encode(f"\n{result.observation['text']}\n")
        chosen += observed  # Part of the context, but not sampled by the policy: masked.
        mask += [0] * len(observed)
        logprobs += [0.0] * len(observed)
        tokens = prompt + chosen
        if result.done:
            break
    letters = sum(token % 2 for token, own in zip(chosen, mask, strict=True) if own)
    return {
        "prompt_ids": prompt,
        "completion_ids": chosen,
        "logprobs": logprobs,
        "env_mask": mask,
        "paid": result.reward,
        "letters": letters / sum(mask),
    }


def main(url: str, model_folder: str, num_steps: int) -> None:
    """Train for a few steps, and print the loss of each."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    asked = {"split": "depth1-train", "start": 0, "stop": 2 * num_steps}
    tasks = requests.post(f"{url}/textcraft/task_range", json=asked, timeout=30).json()["tasks"]

    with GenericEnvClient(base_url=url).sync() as client:

        def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
            played = [play(each, client, trainer.model, tokenizer) for each in prompts]
            return {key: [each[key] for each in played] for key in played[0]}

        def reward(paid: list[float], letters: list[float], **_: Any) -> list[float]:
            # An untrained policy solves nothing. The second part gives its two steps a gradient.
            return [a + 0.1 * b for a, b in zip(paid, letters, strict=True)]

        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            rollout_func=rollout,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": task["id"]} for task in tasks]),
            args=GRPOConfig(
                output_dir="trl-textcraft",
                max_steps=num_steps,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=512,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=not torch.cuda.is_available(),
            ),
        )
        trainer.train()
    for line in trainer.state.log_history:
        if "loss" in line:
            figures = f"reward {line['reward']:.4f} grad {line['grad_norm']:.4f}"
            sys.stdout.write(f"step {line['step']}: {figures}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
