//! What plans make of models, compared with references that go element by element.

use std::collections::BTreeMap;
use std::sync::Arc;

use fastrand::Rng;
use half::bf16;
use serde_json::{Value, json};

use super::{Flat, Share, Source, Tile, ViewPlan, fill, inverse, reads};
use crate::vocabulary::layout::{DType, MIN_BLOCK_SIZE, ModelLayout};
use crate::vocabulary::strided::Strided;

/// A tensor as its elements.
#[derive(Clone, Debug, PartialEq)]
struct Plain {
    shape: Vec<usize>,
    elements: Vec<Vec<u8>>,
}

type Model = Vec<(String, DType, Plain)>;

fn model(tensors: &[(&str, DType, &[usize])], rng: &mut Rng) -> Model {
    let tensor = |(name, dtype, shape): &(&str, DType, &[usize])| {
        let count = shape.iter().product();
        let element = |_| match dtype {
            DType::F32 => rng.f32().to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f32(rng.f32()).to_le_bytes().to_vec(),
            other => (0..other.size_bytes().unwrap()).map(|_| rng.u8(..)).collect(),
        };
        let elements = (0..count).map(element).collect();
        ((*name).to_owned(), *dtype, Plain { shape: shape.to_vec(), elements })
    };
    tensors.iter().map(tensor).collect()
}

fn layout(model: &Model) -> Arc<ModelLayout> {
    let tensors = model.iter().map(|(name, dtype, of)| (name.clone(), *dtype, of.shape.clone()));
    Arc::new(ModelLayout::new(tensors.collect(), MIN_BLOCK_SIZE).unwrap())
}

fn flat(model: &Model, layout: &ModelLayout) -> Vec<u8> {
    let of = |name: &String| model.iter().find(|(known, ..)| known == name).unwrap();
    layout.tensors().iter().flat_map(|tensor| of(&tensor.name).2.elements.concat()).collect()
}

/// A version, and what was read of it.
struct Noted<'a>(Flat<'a>, Vec<Vec<Strided>>);

impl Source for Noted<'_> {
    type Error = std::convert::Infallible;

    fn read(&mut self, pieces: &[Strided], out: &mut [u8]) -> Result<(), Self::Error> {
        self.1.push(pieces.to_vec());
        self.0.read(pieces, out)
    }
}

/// The tensors that the plan makes.
fn made(model: &Model, plan: &Value) -> BTreeMap<String, (DType, Plain)> {
    let source = layout(model);
    let plan = ViewPlan::new(&plan.to_string(), &source).unwrap_or_else(|error| panic!("{error}: {plan}"));
    let mut out = vec![0xee; plan.layout().size() as usize];
    let bytes = flat(model, &source);
    let mut noted = Noted(Flat(&bytes), Vec::new());
    let Ok(()) = fill(&plan, &mut noted, &mut out);
    assert_eq!(
        noted.1,
        reads(&plan).map(|tile| tile.pieces).collect::<Vec<_>>(),
        "what it reads is known before"
    );
    let (mut recovered, mut packed) = (Vec::new(), Vec::new());
    for tile in reads(&plan).filter(Tile::is_kept) {
        recovered.clear();
        tile.recover(&out, &mut recovered);
        packed.resize(tile.bytes() as usize, 0);
        let Ok(()) = Flat(&bytes).read(&tile.pieces, &mut packed);
        assert!(recovered == packed, "what it was made of comes back");
    }
    let tensors = plan.layout().tensors().iter().map(|tensor| {
        let bytes = &out[tensor.bytes.start as usize..tensor.bytes.end as usize];
        let elements = bytes.chunks(tensor.dtype.size_bytes().unwrap()).map(<[u8]>::to_vec).collect();
        (tensor.name.clone(), (tensor.dtype, Plain { shape: tensor.shape.clone(), elements }))
    });
    tensors.collect()
}

fn refusal(model: &Model, plan: &Value) -> String {
    ViewPlan::new(&plan.to_string(), &layout(model)).map(drop).expect_err(&plan.to_string()).to_string()
}

impl Plain {
    fn at(&self, index: &[usize]) -> &Vec<u8> {
        let flat = self.shape.iter().zip(index).fold(0, |flat, (len, at)| flat * len + at);
        &self.elements[flat]
    }

    fn of(shape: Vec<usize>, element: impl Fn(&[usize]) -> Vec<u8>) -> Plain {
        let mut elements = Vec::new();
        for mut number in 0..shape.iter().product() {
            let mut index = vec![0; shape.len()];
            for (at, len) in index.iter_mut().zip(&shape).rev() {
                *at = number % len;
                number /= len;
            }
            elements.push(element(&index));
        }
        Plain { shape, elements }
    }

    fn sliced(&self, dim: usize, start: usize, end: usize) -> Plain {
        let mut shape = self.shape.clone();
        shape[dim] = end - start;
        Plain::of(shape, |index| {
            let mut index = index.to_vec();
            index[dim] += start;
            self.at(&index).clone()
        })
    }

    fn transposed(&self) -> Plain {
        Plain::of(vec![self.shape[1], self.shape[0]], |index| self.at(&[index[1], index[0]]).clone())
    }

    fn followed(&self, next: &Plain, dim: usize) -> Plain {
        let mut shape = self.shape.clone();
        shape[dim] += next.shape[dim];
        Plain::of(shape, |index| {
            let mut index = index.to_vec();
            if index[dim] < self.shape[dim] {
                return self.at(&index).clone();
            }
            index[dim] -= self.shape[dim];
            next.at(&index).clone()
        })
    }
}

const F32: DType = DType::F32;

#[test]
fn parts_of_any_shape_are_where_a_reference_has_them() {
    for seed in 0..300 {
        let mut rng = Rng::with_seed(seed);
        let dtype = *rng.choice(&[F32, DType::BF16, DType::F64, DType::from_name("U8").unwrap()]).unwrap();
        // Some are larger than a piece, and some have single elements.
        let most = if seed % 50 == 0 { 700 } else { 9 };
        let shape: Vec<usize> = match seed % 50 {
            0 => (0..2).map(|_| rng.usize(1..most)).collect(),
            _ => (0..rng.usize(1..5)).map(|_| rng.usize(1..most)).collect(),
        };
        let model = model(&[("before", F32, &[3]), ("w", dtype, &shape)], &mut rng);
        let mut expected: Option<Plain> = None;
        let (dim, mut parts) = (rng.usize(..shape.len()), Vec::new());
        for _ in 0..rng.usize(1..4) {
            let mut of = model[1].2.clone();
            let transpose = shape.len() == 2 && shape[0] == shape[1] && rng.bool();
            let (mut slice, mut split) = (serde_json::Map::new(), Value::Null);
            // The dimension in which the parts follow each other may be cut at will.
            let sliced = if transpose { 1 - dim } else { dim };
            let start = rng.usize(..shape[sliced]);
            let end = rng.usize(start + 1..=shape[sliced]);
            slice.insert(sliced.to_string(), json!([start, end]));
            of = of.sliced(sliced, start, end);
            if rng.bool() {
                let len = end - start;
                let ways = (1..=len).filter(|ways| len.is_multiple_of(*ways)).collect::<Vec<_>>();
                let ways = *rng.choice(&ways).unwrap();
                let part = rng.usize(..ways);
                split = json!({ "dim": sliced, "of": ways, "part": part });
                of = of.sliced(sliced, len / ways * part, len / ways * (part + 1));
            }
            if transpose {
                of = of.transposed();
            }
            parts.push(json!({ "from": "w", "slice": slice, "split": split, "transpose": transpose }));
            expected = Some(expected.map_or(of.clone(), |before| before.followed(&of, dim)));
        }
        let made = made(&model, &json!({ "tensors": [{ "name": "v", "concat": parts, "dim": dim }] }));
        assert!(made["v"].1 == expected.unwrap(), "seed {seed}: {shape:?}");
    }
}

#[test]
fn several_dimensions_are_cut_at_once() {
    let mut rng = Rng::with_seed(7);
    let model = model(&[("w", F32, &[4, 3, 5, 2])], &mut rng);
    let slice = json!({ "0": [1, 3], "1": [2, 3], "2": [1, 4], "3": [1, 2] });
    let made = made(&model, &json!({ "tensors": [{ "from": "w", "slice": slice }] }));
    let expected = model[0].2.sliced(0, 1, 3).sliced(1, 2, 3).sliced(2, 1, 4).sliced(3, 1, 2);
    assert_eq!(made["w"].1, expected);
}

#[test]
fn long_rows_and_long_columns_are_transposed() {
    for shape in [[3, 70_000], [70_000, 3], [600, 500], [1, 1]] {
        let model = model(&[("w", DType::BF16, &shape)], &mut Rng::with_seed(3));
        let plan = json!({ "tensors": [{ "name": "t", "from": "w", "transpose": true, "cast": "f32" }] });
        let (dtype, made) = made(&model, &plan)["t"].clone();
        assert_eq!((dtype, &made.shape[..]), (F32, &[shape[1], shape[0]][..]));
        let wide = |bits: &Vec<u8>| bf16::from_le_bytes([bits[0], bits[1]]).to_f32().to_le_bytes().to_vec();
        let expected = model[0].2.transposed().elements;
        assert!(made.elements.iter().eq(expected.iter().map(wide).collect::<Vec<_>>().iter()), "{shape:?}");
    }
}

#[test]
fn patterns_choose_tensors_and_name_them() {
    let tensors: [(&str, DType, &[usize]); 5] = [
        ("l.0.q", F32, &[2, 2]),
        ("l.0.k", F32, &[1, 2]),
        ("l.1.q", F32, &[2, 2]),
        ("l.1.k", F32, &[1, 2]),
        ("end", F32, &[1]),
    ];
    let model = model(&tensors, &mut Rng::with_seed(1));
    let all = made(
        &model,
        &json!({
            "tensors": [
                { "name": "b.*.qk", "concat": [{ "from": "l.*.q" }, { "from": "l.*.k" }] },
            ],
            "rest": true,
            "all": true,
        }),
    );
    assert_eq!(all.keys().collect::<Vec<_>>(), ["b.0.qk", "b.1.qk", "end"]);
    assert_eq!(all["b.1.qk"].1, model[2].2.followed(&model[3].2, 0));
    let some = made(&model, &json!({ "tensors": [{ "from": "l.?.k" }, { "name": "x/*", "from": "e*d" }] }));
    assert_eq!(some.keys().collect::<Vec<_>>(), ["l.0.k", "l.1.k", "x/n"]);
}

fn llama(layers: usize) -> Vec<(String, Vec<usize>)> {
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![24, 8])];
    for layer in 0..layers {
        let of = |name: &str, shape: &[usize]| (format!("model.layers.{layer}.{name}"), shape.to_vec());
        tensors.extend([
            of("self_attn.q_proj.weight", &[8, 8]),
            of("self_attn.q_proj.bias", &[8]),
            of("self_attn.k_proj.weight", &[4, 8]),
            of("self_attn.k_proj.bias", &[4]),
            of("self_attn.v_proj.weight", &[4, 8]),
            of("self_attn.v_proj.bias", &[4]),
            of("self_attn.o_proj.weight", &[8, 8]),
            of("self_attn.o_proj.bias", &[8]),
            of("mlp.gate_proj.weight", &[12, 8]),
            of("mlp.up_proj.weight", &[12, 8]),
            of("mlp.down_proj.weight", &[8, 12]),
            of("input_layernorm.weight", &[8]),
        ]);
    }
    tensors.push(("lm_head.weight".to_owned(), vec![24, 8]));
    tensors
}

fn llama_model(tensors: &[(String, Vec<usize>)]) -> Model {
    let tensors: Vec<_> = tensors.iter().map(|(name, shape)| (&**name, DType::BF16, &shape[..])).collect();
    model(&tensors, &mut Rng::with_seed(5))
}

#[test]
fn the_ranks_of_a_style_together_are_the_model() {
    let model = llama_model(&llama(2));
    for tp in [1, 2, 4] {
        let style = |rank| json!({ "style": "hf-llama", "tp": tp, "rank": rank });
        let ranks: Vec<_> = (0..tp).map(|rank| made(&model, &style(rank))).collect();
        for (name, dtype, of) in &model {
            let parts: Vec<&Plain> = ranks.iter().map(|rank| &rank[name].1).collect();
            let is_row = ["o_proj.weight", "down_proj.weight"].iter().any(|row| name.ends_with(row));
            let is_whole = name.contains("layernorm") || name.ends_with("o_proj.bias");
            let together = parts[1..].iter().fold(parts[0].clone(), |all, part| match is_whole {
                true => all,
                false => all.followed(part, usize::from(is_row)),
            });
            assert_eq!((&together, *dtype), (of, DType::BF16), "{name} of {tp}");
        }
    }
}

#[test]
fn a_style_fuses_modules_and_gives_heads_to_several_ranks() {
    let model = llama_model(&llama(1));
    let plan = |rank| {
        let plan = json!({ "style": "hf-llama", "tp": 4, "rank": rank, "heads": 4, "kv_heads": 2, "fuse": ["qkv", "gate_up"] });
        made(&model, &plan)
    };
    let of = |name: &str| {
        let found = model.iter().find(|(known, ..)| known.ends_with(name));
        found.unwrap().2.clone()
    };
    for rank in 0..4 {
        let part = |name, rows: usize, at: usize| of(name).sliced(0, at * rows, (at + 1) * rows);
        let all = plan(rank);
        let qkv = part("q_proj.weight", 2, rank)
            .followed(&part("k_proj.weight", 2, rank / 2), 0)
            .followed(&part("v_proj.weight", 2, rank / 2), 0);
        assert_eq!(all["model.layers.0.self_attn.qkv_proj.weight"].1, qkv);
        let gate_up = part("gate_proj.weight", 3, rank).followed(&part("up_proj.weight", 3, rank), 0);
        assert_eq!(all["model.layers.0.mlp.gate_up_proj.weight"].1, gate_up);
        assert!(all.contains_key("model.layers.0.self_attn.qkv_proj.bias"));
        assert!(!all.keys().any(|name| name.contains("k_proj") || name.contains("mlp.up_proj")));
    }
}

#[test]
fn each_rank_has_its_experts_whole() {
    let mut tensors = llama(1);
    for expert in 0..4 {
        tensors.push((format!("model.layers.0.mlp.experts.{expert}.gate_proj.weight"), vec![6, 8]));
    }
    let model = llama_model(&tensors);
    let plan = |of, rank| json!({ "style": "hf-llama", "tp": 2, "experts": { "of": of, "rank": rank } });
    let has = |made: &BTreeMap<String, (DType, Plain)>| -> Vec<String> {
        made.keys().filter(|name| name.contains("experts")).cloned().collect()
    };
    let made = made(&model, &plan(2, 1));
    let names = [2, 3].map(|expert| format!("model.layers.0.mlp.experts.{expert}.gate_proj.weight"));
    assert_eq!(has(&made), names);
    assert_eq!(made[&names[0]].1.shape, [6, 8]);
    assert!(
        refusal(&model, &plan(3, 0)).contains("model.layers.0.mlp.experts has 4, which 3 does not divide")
    );
    assert!(refusal(&model, &plan(2, 2)).contains("no rank 2 of 2 for experts"));
    let none = llama_model(&llama(1));
    assert!(refusal(&none, &plan(2, 0)).contains("no experts"));
}

#[test]
fn a_wrong_plan_is_refused_by_the_name_of_what_is_wrong() {
    let tensors: [(&str, DType, &[usize]); 4] = [
        ("w", F32, &[4, 6]),
        ("b", DType::BF16, &[4]),
        ("n", DType::from_name("I64").unwrap(), &[2]),
        ("x.k_proj.weight", F32, &[6, 2]),
    ];
    let model = model(&tensors, &mut Rng::with_seed(1));
    let one = |entry: Value| json!({ "tensors": [entry] });
    for (plan, words) in [
        (json!([]), "not a plan"),
        (json!({}), "the plan has no tensor"),
        (json!({ "tensors": [{ "from": "w" }], "tp": 2 }), "\"tp\", which is unknown, or goes with a style"),
        (json!({ "style": "gpt", "tp": 2 }), "unknown variant"),
        (one(json!({ "form": "w" })), "unknown field `form`"),
        (one(json!({ "name": "z", "concat": [] })), "see that of \"z\""),
        (one(json!({})), "one has neither \"name\" nor \"from\""),
        (one(json!({ "from": "v" })), "the model has no tensor \"v\""),
        (one(json!({ "from": "v*" })), "no tensor has a name that matches \"v*\""),
        (one(json!({ "name": "v", "concat": [{ "from": "w" }, { "from": "u" }] })), "no tensor \"u\""),
        (one(json!({ "name": "a*", "from": "w" })), "\"a*\" has more * than \"w\""),
        (one(json!({ "from": "w", "slice": { "1": [4, 7] } })), "\"w\" of shape [4, 6] has no slice [4, 7]"),
        (one(json!({ "from": "w", "slice": { "2": [0, 1] } })), "of dimension 2"),
        (one(json!({ "from": "w", "slice": { "0": [2, 2] } })), "slice [2, 2]"),
        (one(json!({ "from": "w", "slice": { "0": [-1, 2] } })), "not a plan"),
        (
            one(json!({ "from": "w", "split": { "dim": 1, "of": 4, "part": 0 } })),
            "6, which 4 does not divide",
        ),
        (one(json!({ "from": "w", "split": { "dim": 1, "of": 3, "part": 3 } })), "no part 3 of 3"),
        (one(json!({ "from": "w", "split": { "dim": 1, "of": 0, "part": 0 } })), "no part 0 of 0"),
        (one(json!({ "from": "w", "split": { "dim": 5, "of": 1, "part": 0 } })), "no dimension 5"),
        (one(json!({ "from": "b", "transpose": true })), "transpose takes two dimensions"),
        (one(json!({ "from": "n", "cast": "f32" })), "\"n\" is I64, which cannot be cast to F32"),
        (one(json!({ "from": "b", "cast": "f8_e4m3" })), "\"b\" is BF16, which cannot be cast to F8_E4M3"),
        (one(json!({ "from": "w", "cast": "f33" })), "cast: unknown element type \"f33\""),
        (one(json!({ "name": "v", "concat": [{ "from": "w" }, { "from": "b" }] })), "\"b\" is BF16"),
        (
            one(json!({ "name": "v", "concat": [{ "from": "w" }, { "from": "x.k_proj.weight" }] })),
            "\"x.k_proj.weight\" with [6, 2] does not follow [4, 6] in dimension 0",
        ),
        (
            one(json!({ "name": "v", "concat": [{ "from": "w" }, { "from": "w" }], "dim": 2 })),
            "in dimension 2",
        ),
        (one(json!({ "concat": [{ "from": "w" }] })), "an entry has \"from\""),
        (one(json!({ "name": "v", "from": "w", "concat": [{ "from": "w" }] })), "an entry has \"from\""),
        (
            one(json!({ "name": "v", "concat": [{ "from": "w" }], "transpose": true })),
            "an entry has \"from\"",
        ),
        (one(json!({ "from": "w", "dim": 1 })), "an entry has \"from\""),
        (one(json!({ "name": "../v", "from": "w" })), "as a path component"),
        (json!({ "tensors": [{ "from": "w" }, { "from": "w" }] }), "two tensors are named \"w\""),
        (json!({ "tensors": [{ "from": "w" }], "all": true }), "leaves out parts of tensor \"b\""),
        (
            json!({ "tensors": [
                { "name": "u", "from": "w", "slice": { "0": [0, 3] } },
                { "name": "v", "from": "w", "slice": { "0": [2, 4] } },
            ], "rest": true, "all": true }),
            "the plan overlaps: it has parts of tensor \"w\" twice",
        ),
        (
            json!({ "tensors": [{ "from": "w", "slice": { "0": [0, 3] } }], "rest": true, "all": true }),
            "leaves out parts of tensor \"w\"",
        ),
        (json!({ "style": "hf-llama", "tp": 2, "rest": true }), "a style has the rest already"),
        (json!({ "style": "hf-llama", "tp": 2, "rank": 2 }), "no rank 2 of 2"),
        (json!({ "style": "hf-llama", "tp": 0 }), "no rank 0 of 0"),
        (json!({ "style": "hf-llama", "tp": 4 }), "\"x.k_proj.weight\": its dimension 0 has 6, which 4"),
        (
            json!({ "style": "hf-llama", "tp": 2, "kv_heads": 3 }),
            "\"x.k_proj.weight\" has 3 heads, which 2 ranks do not divide",
        ),
        (json!({ "style": "hf-llama", "tp": 2, "kv_heads": 0 }), "not a plan"),
        (json!({ "style": "hf-llama", "tp": 2, "ep": 0 }), "unknown field `ep`"),
        (json!({ "style": "hf-llama", "fuse": ["kv"] }), "unknown variant `kv`"),
    ] {
        let message = refusal(&model, &plan);
        assert!(message.contains(words), "{plan}\n{message}");
    }
    let odd = |name: &str| json!({ "style": "hf-llama", "tp": 2, "tensors": [{ "from": name }] });
    assert!(refusal(&model, &odd("x.k_proj.weight")).contains("no tensor of the model has a name"));
    let scale = model_of("a.q_proj.weight_scale");
    assert!(
        refusal(&scale, &json!({ "style": "hf-llama", "tp": 2 })).contains("does not know how it is split")
    );
    let fused = model_of("a.qkv_proj.weight");
    assert!(
        refusal(&fused, &json!({ "style": "hf-llama", "tp": 2 })).contains("does not know how it is split")
    );
    let alone = model_of("a.q_proj.weight");
    let fuses = json!({ "style": "hf-llama", "tp": 2, "fuse": ["qkv"] });
    assert!(refusal(&alone, &fuses).contains("qkv_proj takes the tensor \"a.k_proj.weight\""));
}

fn model_of(name: &str) -> Model {
    model(&[(name, F32, &[4, 4])], &mut Rng::with_seed(1))
}

#[test]
fn elements_of_less_than_a_byte_are_carried_whole() {
    let packed = DType::from_name("F4").unwrap();
    let tensors = vec![("w".to_owned(), packed, vec![4, 2]), ("b".to_owned(), F32, vec![1])];
    let source = Arc::new(ModelLayout::new(tensors, MIN_BLOCK_SIZE).unwrap());
    let plan = |entry: Value| ViewPlan::new(&json!({ "tensors": [entry] }).to_string(), &source);
    let whole = plan(json!({ "name": "v", "from": "w" })).unwrap();
    let (bytes, mut out): (Vec<u8>, _) = ((1..=8).collect(), vec![0; 4]);
    let at = source.tensors()[source.tensor_index("w").unwrap()].bytes.clone();
    let Ok(()) = fill(&whole, &mut Flat(&bytes), &mut out);
    assert_eq!(out, bytes[at.start as usize..at.end as usize]);
    let refused =
        [json!({ "from": "w", "slice": { "0": [0, 2] } }), json!({ "from": "w", "transpose": true })];
    for entry in refused {
        assert!(plan(entry).unwrap_err().to_string().contains("less than a byte"));
    }
}

/// A part of a model, as one rank publishes it.
fn written(model: &Model, plan: &Value, into: &mut [Option<u8>]) {
    let source = layout(model);
    let plan = ViewPlan::new(&plan.to_string(), &source).unwrap();
    plan.check_inverse().unwrap();
    let (bytes, mut view) = (flat(model, &source), vec![0; plan.layout().size() as usize]);
    let Ok(()) = fill(&plan, &mut Flat(&bytes), &mut view);
    let bytes_of = |pieces: &[Strided]| pieces.iter().flat_map(Strided::pieces).flatten().collect::<Vec<_>>();
    for (of_model, of_view) in inverse(&plan) {
        let (to, from) = (bytes_of(&of_model), bytes_of(&of_view));
        assert_eq!(to.len(), from.len(), "as many bytes as the pieces have");
        to.into_iter().zip(from).for_each(|(to, from)| into[to as usize] = Some(view[from as usize]));
    }
}

#[test]
fn what_all_ranks_publish_is_the_model() {
    for (tp, fuse) in [(1, json!([])), (2, json!(["qkv", "gate_up"])), (4, json!(["qkv"])), (4, json!([]))] {
        let model = llama_model(&llama(2));
        let source = layout(&model);
        let mut all = vec![None; source.size() as usize];
        for rank in (0..tp).rev() {
            written(&model, &json!({ "style": "hf-llama", "tp": tp, "rank": rank, "fuse": fuse }), &mut all);
        }
        let expected: Vec<_> = flat(&model, &source).into_iter().map(Some).collect();
        assert!(all == expected, "{tp} ranks");
    }
}

#[test]
fn what_a_view_was_made_of_is_where_it_is_published() {
    for seed in 0..60 {
        let mut rng = Rng::with_seed(seed);
        let shape: Vec<_> = (0..rng.usize(1..4)).map(|_| rng.usize(1..40)).collect();
        let model = model(&[("before", F32, &[3]), ("w", F32, &shape)], &mut rng);
        let mut slice = serde_json::Map::new();
        for (dim, &len) in shape.iter().enumerate() {
            let start = rng.usize(..len);
            slice.insert(dim.to_string(), json!([start, rng.usize(start + 1..=len)]));
        }
        let elements = |of: &Value| (of[1].as_u64().unwrap() - of[0].as_u64().unwrap()) as usize;
        let count: usize = slice.values().map(elements).product();
        let source = layout(&model);
        let mut all = vec![None; source.size() as usize];
        let entry = json!({ "name": "v", "from": "w", "slice": slice });
        written(&model, &json!({ "tensors": [entry], "publish": { "part": 0, "of": 3 } }), &mut all);
        let bytes = flat(&model, &source);
        assert!(all.iter().zip(&bytes).all(|(got, is)| got.is_none_or(|got| got == *is)), "seed {seed}");
        assert_eq!(all.iter().flatten().count(), 4 * count, "seed {seed}");
    }
}

#[test]
fn a_plan_says_which_part_it_publishes() {
    let model = llama_model(&llama(1));
    let source = layout(&model);
    let share = |plan: Value| ViewPlan::new(&plan.to_string(), &source).unwrap().share();
    let some = |part, of, all| Some(Share { part, of, all });
    assert_eq!(share(json!({ "style": "hf-llama", "tp": 4, "rank": 3 })), some(3, 4, false));
    let plan = json!({ "style": "hf-llama", "tp": 4, "rank": 3, "publish": { "all": true } });
    assert_eq!(share(plan), some(3, 4, true));
    let plan = json!({ "style": "hf-llama", "tp": 2, "publish": { "part": 5, "of": 6 } });
    assert_eq!(share(plan), some(5, 6, false));
    let one = json!([{ "from": "lm_head.weight" }]);
    assert_eq!(share(json!({ "tensors": one })), None);
    for publish in
        [json!({ "part": 1 }), json!({}), json!({ "part": 2, "of": 2 }), json!({ "part": 0, "of": 4097 })]
    {
        let message = refusal(&model, &json!({ "tensors": one, "publish": publish }));
        assert!(message.contains("publish: "), "{message}");
    }
    for (entry, words) in [
        (json!({ "from": "lm_head.weight", "cast": "f32" }), "is cast"),
        (json!({ "from": "lm_head.weight", "transpose": true }), "is transposed"),
        (
            json!({ "name": "v", "concat": [{ "from": "lm_head.weight" }, { "from": "lm_head.weight" }] }),
            "parts of tensor \"lm_head.weight\" twice",
        ),
    ] {
        let message = refusal(&model, &json!({ "tensors": [entry], "publish": { "part": 0, "of": 2 } }));
        assert!(message.contains(words), "{message}");
    }
}
