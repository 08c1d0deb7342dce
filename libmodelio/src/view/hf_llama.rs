//! The ready-made plan for models with the names of Llama in Hugging Face's libraries: one rank's share of tensors and
//! experts, as inference engines hold it.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use serde::Deserialize;

use super::part::{Part, PlanError, Split, Wanted, unfit};
use crate::vocabulary::layout::{ModelLayout, Tensor, shown};

/// Modules whose outputs are split, so the first dimension of weights and biases is.
const COLUMNS: [&str; 9] =
    ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"];
/// Modules whose inputs are split: the second dimension of weights is, and each rank has the bias.
const ROWS: [&str; 3] = ["o_proj", "down_proj", "w2"];
/// Modules that hold several others.
const FUSED: [&str; 2] = ["qkv_proj", "gate_up_proj"];

/// What the plan says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HfLlama {
    #[serde(default = "one")]
    tp: usize,
    #[serde(default)]
    rank: usize,
    heads: Option<NonZeroUsize>,
    kv_heads: Option<NonZeroUsize>,
    #[serde(default)]
    fuse: Vec<Fuse>,
    experts: Option<Experts>,
}

fn one() -> usize {
    1
}

/// Modules that become one.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Fuse {
    Qkv,
    GateUp,
}

impl Fuse {
    fn modules(self) -> (&'static [&'static str], &'static str) {
        match self {
            Fuse::Qkv => (&["q_proj", "k_proj", "v_proj"], FUSED[0]),
            Fuse::GateUp => (&["gate_proj", "up_proj"], FUSED[1]),
        }
    }
}

/// The experts of one rank: as many, one behind the other, as each other rank has.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Experts {
    of: usize,
    rank: usize,
}

/// The name of a tensor: what is in front of its module, the module, and what of that it is.
fn names(tensor: &Tensor) -> (&str, &str, &str) {
    let (module, leaf) = tensor.name.rsplit_once('.').unwrap_or(("", &tensor.name));
    let (front, module) = module
        .rsplit_once('.')
        .map_or(("", module), |(_, last)| (&module[..module.len() - last.len()], last));
    (front, module, leaf)
}

/// The layer of an expert's tensor, and the expert's number.
fn expert_of(tensor: &Tensor) -> Option<(&str, usize)> {
    let (layer, rest) = tensor.name.split_once(".experts.")?;
    Some((layer, rest.split('.').next()?.parse().ok()?))
}

impl HfLlama {
    /// The rank, and the number of ranks, if these say all of what it has.
    pub(super) fn rank(&self) -> Option<(u32, u32)> {
        let (rank, tp) = (u32::try_from(self.rank).ok()?, u32::try_from(self.tp).ok()?);
        Some((rank, tp)).filter(|_| self.experts.is_none())
    }

    /// The tensors of the rank. Those that are read already are left out.
    pub(super) fn expand(
        &self,
        source: &ModelLayout,
        is_read: &[bool],
        wanted: &mut Vec<Wanted>,
    ) -> Result<(), PlanError> {
        let (tp, rank) = (self.tp, self.rank);
        if rank >= tp {
            return unfit(format!("there is no rank {rank} of {tp}, the first one is 0"));
        }
        let experts = self.experts_of(source)?;
        let mut is_split = tp == 1;
        for (index, tensor) in source.tensors().iter().enumerate().filter(|(index, _)| !is_read[*index]) {
            let expert = expert_of(tensor);
            if let (Some(share), Some((layer, expert))) = (self.experts, expert) {
                // An expert that is here is whole.
                if expert / (experts[layer] / share.of) == share.rank {
                    wanted.push(Wanted::whole(index, tensor));
                }
                continue;
            }
            let (front, module, leaf) = names(tensor);
            let fused = self.fuse.iter().map(|fuse| fuse.modules()).find(|(of, _)| of.contains(&module));
            let Some((modules, name)) = fused else {
                let part = self.part(index, tensor)?;
                is_split |= part != Part::whole(index, tensor);
                wanted.push(Wanted { parts: vec![part], ..Wanted::whole(index, tensor) });
                continue;
            };
            if module != modules[0] {
                continue;
            }
            is_split = true;
            let part = |module: &&str| {
                let of = format!("{front}{module}.{leaf}");
                match source.tensor_index(&of).filter(|&index| !is_read[index]) {
                    Some(index) => self.part(index, &source.tensors()[index]),
                    None => unfit(format!("{name} takes the tensor {:?}, which is not there", shown(&of))),
                }
            };
            let parts: Result<Vec<Part>, PlanError> = modules.iter().map(part).collect();
            wanted.push(Wanted { name: format!("{front}{name}.{leaf}"), parts: parts?, dim: 0, cast: None });
        }
        match is_split {
            true => Ok(()),
            false => unfit("no tensor of the model has a name that style hf-llama splits, as q_proj".into()),
        }
    }

    /// The number of experts in each layer that has some.
    fn experts_of<'a>(&self, source: &'a ModelLayout) -> Result<BTreeMap<&'a str, usize>, PlanError> {
        let mut experts = BTreeMap::new();
        for (layer, expert) in source.tensors().iter().filter_map(expert_of) {
            let most = experts.entry(layer).or_insert(0);
            *most = (*most).max(expert.saturating_add(1));
        }
        let Some(Experts { of, rank }) = self.experts else { return Ok(experts) };
        if rank >= of {
            return unfit(format!("there is no rank {rank} of {of} for experts, the first one is 0"));
        }
        if experts.is_empty() {
            return unfit("the model has no experts: no name has \".experts.\" and a number in it".into());
        }
        match experts.iter().find(|(_, count)| **count % of != 0) {
            Some((layer, count)) => unfit(format!("{layer}.experts has {count}, which {of} does not divide")),
            None => Ok(experts),
        }
    }

    /// The rank's part of a tensor.
    fn part(&self, index: usize, tensor: &Tensor) -> Result<Part, PlanError> {
        let mut part = Part::whole(index, tensor);
        let ((_, module, leaf), name) = (names(tensor), shown(&tensor.name));
        let (is_column, is_row) = (COLUMNS.contains(&module), ROWS.contains(&module));
        let is_known = (is_column || is_row) && ["weight", "bias"].contains(&leaf);
        // Scales of quantized weights, say, or all experts in one tensor.
        let is_odd =
            [module, leaf].iter().any(|of| [&COLUMNS[..], &ROWS, &FUSED].iter().any(|all| all.contains(of)));
        if is_odd && !is_known && (self.tp > 1 || self.experts.is_some()) {
            let what = "style hf-llama does not know how it is split: name it in \"tensors\"";
            return unfit(format!("tensor {name:?}: {what}"));
        }
        if self.tp == 1 || !is_known {
            return Ok(part);
        }
        if is_row && leaf == "bias" {
            return Ok(part);
        }
        let (mut of, mut at) = (self.tp, self.rank);
        let heads = match module {
            "q_proj" | "o_proj" => self.heads.map(NonZeroUsize::get),
            "k_proj" | "v_proj" => self.kv_heads.map(NonZeroUsize::get),
            _ => None,
        };
        match heads {
            // Several ranks have the same head.
            Some(heads) if module != "q_proj" && module != "o_proj" && of % heads == 0 => {
                at /= of / heads;
                of = heads;
            }
            Some(heads) if heads % of != 0 => {
                return unfit(format!("tensor {name:?} has {heads} heads, which {of} ranks do not divide"));
            }
            _ => {}
        }
        part.split(Split { dim: usize::from(is_row), of, part: at }, tensor)?;
        Ok(part)
    }
}
