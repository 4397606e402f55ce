"""Claims of the Delightful Policy Gradient papers and others, measured again at small scale, each by one command.

| module | claim |
|---|---|
| `digits` | one-step bandit: DG stays right however old the actor, importance weights and REINFORCE do not |
| `reversal` | token reversal, stale or buggy actors, corrupted rewards, rare discoveries: about 10 × lower error |
| `terminal` | one reward at the end: where DG is said to fail |
| `single_arm` | how much of the failures' gradient DG removes: its second moment across the true direction |
| `kondo` | 3 % of the backward passes are enough |
| `off_policy` | (ours) which correction holds when actors are inexact, stale or broken; what foretells a fall |
| `failures` | (ours) what failures of actors, nodes and the learner cost 1,000 nodes, in virtual time |
| `peers` | AReaL, verl, RollPacker: what they report, in simulation |
| `cut_responses` | (ours) over-provisioned responses: bias of lengths and rewards against speed, weighed or not |
| `curriculum` | (ours) samplers and filters of prompts: samples until a reward, with a table as the policy |
| `warm_start` | (ours) imitation makes RL possible; distillation into a smaller student, at age 0 and 8 |

| shared | what it does |
|---|---|
| `algorithms` | losses of `learners.losses` by name, and one call that applies them to many learners at once |
| `stacks` | many independent learners in one tensor: parameters, Adam, the transformer |
| `tokens` | token reversal: prompts, rewards, actors and what goes wrong with them, the training loop |
| `lagging` | the loop of `off_policy`: learners behind stale or inexact actors, and what they see of it |
| `gated` | its policy, a few thousand numbers |
| `arithmetic` | another one: the upper layers of a pretrained model, on sums of reasoning_gym |
| `designs` | its studies: methods, conditions, what is tuned |
| `foretelling` | which of those signs foretells a collapse (ROC) |
| `found` | `results.csv` of those studies, and the tables and pictures that are made from it |
| `kept` | `results.csv` of a study, and where the published ones are |
| `page` | the tables of docs/off-policy.md, and of docs/results.md |
| `studies` | tune every algorithm on one grid, measure with fresh seeds, keep, show |

The losses are those that `learners.learner` trains with. The claims have their own small models and loops, because
hundreds of learners are trained side by side.
"""
