//! Checkpoints in safetensors layout whose every byte follows from the step number.
//!
//! The file is the real format: eight bytes of header length, a JSON header that names each tensor's type, shape
//! and range, then the tensors without gaps. What a byte must be can be computed for any offset, so a reader needs
//! no copy to compare with. Training is imitated in one respect: from one step to the next a quarter of the
//! layers change.
#![forbid(unsafe_code)]

use serde_json::{Map, Value, json};

/// Data begins at a multiple of this, and so do all large tensors.
const ALIGN: u64 = 4096;
const LAYERS: u64 = 12;
/// A layer changes every so many steps.
const TURNS: u64 = 4;
/// Bytes per value (BF16).
const VALUE_BYTES: u64 = 2;
/// A BF16 not-a-number, as a run that went wrong leaves everywhere.
const NAN: [u8; 2] = 0x7fc0_u16.to_le_bytes();

/// What a checkpoint holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The model after that many steps, steps counted from 1.
    Good {
        /// The step.
        step: u64,
    },
    /// The model after the run went wrong: not-a-number everywhere.
    Bad {
        /// The step.
        step: u64,
    },
}

/// One tensor.
#[derive(Debug)]
struct Tensor {
    name: String,
    shape: Vec<u64>,
    /// From the start of the file.
    offset: u64,
    len: u64,
    /// The layer it belongs to; `None` for what changes with every step.
    layer: Option<u64>,
}

/// The layout all checkpoints of a model share.
#[derive(Debug)]
pub struct Layout {
    header_len: u64,
    tensors: Vec<Tensor>,
    file_len: u64,
}

impl Layout {
    /// A model whose file is about `bytes` long.
    pub fn new(bytes: u64) -> Layout {
        // 12 layers of 16 h² values and two embeddings of 8 h² each: 208 h² values, 416 h² bytes. A width that is
        // a multiple of 64 makes every matrix a multiple of 4 KiB.
        let width = ((bytes as f64 / 416.0).sqrt() / 64.0).round().max(1.0) as u64 * 64;
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: Vec<u64>, layer| {
            let len = shape.iter().product::<u64>() * VALUE_BYTES;
            tensors.push(Tensor { name, shape, offset: 0, len, layer });
        };
        add("model.embed_tokens.weight".to_owned(), vec![8 * width, width], Some(0));
        for layer in 0..LAYERS {
            for part in ["q_proj", "k_proj", "v_proj", "o_proj"] {
                add(format!("model.layers.{layer}.self_attn.{part}.weight"), vec![width, width], Some(layer));
            }
            for (part, shape) in [
                ("gate_proj", [4 * width, width]),
                ("up_proj", [4 * width, width]),
                ("down_proj", [width, 4 * width]),
            ] {
                add(format!("model.layers.{layer}.mlp.{part}.weight"), shape.to_vec(), Some(layer));
            }
        }
        add("lm_head.weight".to_owned(), vec![8 * width, width], Some(1));
        // Small, and so at the end, where they misalign nothing.
        add("model.norm.weight".to_owned(), vec![width], None);
        let mut layout = Layout { header_len: 0, tensors, file_len: 0 };
        // The length of the header does not depend on the step, which is padded, nor on itself.
        layout.header_len =
            (8 + layout.header_json(Content::Good { step: 1 }).len() as u64).next_multiple_of(ALIGN);
        let mut offset = layout.header_len;
        for tensor in &mut layout.tensors {
            tensor.offset = offset;
            offset += tensor.len;
        }
        layout.file_len = offset;
        layout
    }

    /// The length of a file in bytes.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// The space of a file on a volume: whole blocks, zeros at the end.
    pub fn blocks_len(&self) -> u64 {
        self.file_len.next_multiple_of(ALIGN)
    }

    /// How many tensors there are.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The ranges that must be written to get from the step before to `content`, in whole blocks, ascending.
    pub fn changes(&self, content: Content, from_nothing: bool) -> Vec<(u64, u64)> {
        let Content::Good { step } = content else { return vec![(0, self.blocks_len())] };
        if from_nothing {
            return vec![(0, self.blocks_len())];
        }
        let mut ranges: Vec<(u64, u64)> = vec![(0, self.header_len)];
        for tensor in self.tensors.iter().filter(|tensor| changed_at(tensor, step) == step) {
            let end = (tensor.offset + tensor.len).next_multiple_of(ALIGN);
            match ranges.last_mut() {
                Some((start, len)) if *start + *len == tensor.offset => *len = end - *start,
                _ => ranges.push((tensor.offset, end - tensor.offset)),
            }
        }
        ranges
    }

    /// Writes into `out` what the file holds from `offset` on; zeros behind its end. `offset` and the length of
    /// `out` are multiples of eight.
    pub fn fill(&self, content: Content, offset: u64, out: &mut [u8]) {
        out.fill(0);
        let end = offset + out.len() as u64;
        if offset < self.header_len {
            let header = self.header(content);
            let from = offset as usize;
            let count = (header.len() - from).min(out.len());
            out[..count].copy_from_slice(&header[from..from + count]);
        }
        let first = self.tensors.partition_point(|tensor| tensor.offset + tensor.len <= offset);
        for (index, tensor) in self.tensors.iter().enumerate().skip(first) {
            if tensor.offset >= end {
                break;
            }
            let from = tensor.offset.max(offset);
            let to = (tensor.offset + tensor.len).min(end);
            let part = &mut out[(from - offset) as usize..(to - offset) as usize];
            match content {
                Content::Bad { .. } => part.chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&NAN)),
                Content::Good { step } => {
                    let seed = mix((index as u64 + 1) << 32 | changed_at(tensor, step));
                    fill_words(seed, (from - tensor.offset) / 8, part);
                }
            }
        }
    }

    /// The step whose checkpoint a volume's first block belongs to, if it is one of this layout.
    pub fn recognise(&self, head: &[u8]) -> Option<Content> {
        let len = u64::from_le_bytes(head.get(..8)?.try_into().ok()?);
        let json = head.get(8..8 + usize::try_from(len).ok()?)?;
        let header: Value = serde_json::from_slice(json).ok()?;
        let step = header["__metadata__"]["step"].as_str()?.trim().parse().ok()?;
        let content = match header["__metadata__"]["state"].as_str()?.trim() {
            "good" => Content::Good { step },
            _ => Content::Bad { step },
        };
        (self.header(content) == head[..self.header_len as usize]).then_some(content)
    }

    /// The length of the header with its padding, a multiple of 4096.
    pub fn header_len(&self) -> u64 {
        self.header_len
    }

    fn header(&self, content: Content) -> Vec<u8> {
        let mut json = self.header_json(content).into_bytes();
        // The format allows blanks behind the header's JSON, for this very purpose.
        json.resize(self.header_len as usize - 8, b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        header
    }

    fn header_json(&self, content: Content) -> String {
        let (step, state) = match content {
            Content::Good { step } => (step, "good"),
            Content::Bad { step } => (step, "bad "),
        };
        let mut header = Map::new();
        let step = format!("{step:>20}");
        header.insert("__metadata__".to_owned(), json!({ "format": "pt", "state": state, "step": step }));
        // Ranges count from the start of the data; their width must not change the header's length, which the
        // first call computes before offsets are known, so they are taken from running sums.
        let mut at = 0;
        for tensor in &self.tensors {
            let range = [at, at + tensor.len];
            at += tensor.len;
            let entry = json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": range });
            header.insert(tensor.name.clone(), entry);
        }
        Value::Object(header).to_string()
    }
}

/// The last step, not after `step`, at which the tensor changed.
fn changed_at(tensor: &Tensor, step: u64) -> u64 {
    match tensor.layer {
        None => step,
        Some(layer) => {
            let since = (step + TURNS - layer % TURNS) % TURNS;
            step.saturating_sub(since).max(1)
        }
    }
}

/// Steele, Lea and Flood's finalizer: every input bit reaches every output bit.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Words `first`, `first + 1` … of the sequence of `seed`; a piece at the end may be shorter than a word.
fn fill_words(seed: u64, first: u64, out: &mut [u8]) {
    for (index, word) in (first..).zip(out.chunks_mut(8)) {
        let bytes = mix(seed ^ index).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(layout: &Layout, content: Content) -> Vec<u8> {
        let mut file = vec![0; layout.blocks_len() as usize];
        layout.fill(content, 0, &mut file);
        file
    }

    #[test]
    fn the_file_is_a_valid_safetensors_file() {
        let layout = Layout::new(3 << 20);
        let file = whole(&layout, Content::Good { step: 7 });
        let len = u64::from_le_bytes(file[..8].try_into().unwrap());
        let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + len as usize]).unwrap();
        assert_eq!((8 + len) % ALIGN, 0);
        let mut at = 0;
        for (name, tensor) in header.iter().filter(|(name, _)| *name != "__metadata__") {
            let [from, to] = [0, 1].map(|i| tensor["data_offsets"][i].as_u64().unwrap());
            let values: u64 =
                tensor["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).product();
            assert_eq!((from, to - from), (at, values * 2), "{name}");
            at = to;
        }
        assert_eq!(8 + len + at, layout.file_len());
        assert_eq!(header.len(), layout.tensor_count() + 1);
    }

    #[test]
    fn any_piece_equals_the_same_piece_of_the_whole() {
        let layout = Layout::new(2 << 20);
        for content in [Content::Good { step: 5 }, Content::Bad { step: 6 }] {
            let file = whole(&layout, content);
            for (offset, len) in [(0, 4096), (4096, 8192), (layout.header_len() - 64, 128), (98_304, 65_536)]
            {
                let mut piece = vec![0xaa; len];
                layout.fill(content, offset, &mut piece);
                assert!(piece == file[offset as usize..offset as usize + len], "{offset}+{len}");
            }
        }
    }

    #[test]
    fn changes_are_all_that_differs_and_about_a_quarter() {
        let layout = Layout::new(4 << 20);
        for step in 2..10 {
            let (mut before, after) =
                (whole(&layout, Content::Good { step: step - 1 }), whole(&layout, Content::Good { step }));
            let changes = layout.changes(Content::Good { step }, false);
            for (offset, len) in &changes {
                let range = *offset as usize..(*offset + *len) as usize;
                before[range.clone()].copy_from_slice(&after[range]);
            }
            assert!(before == after, "step {step}");
            let changed: u64 = changes.iter().map(|(_, len)| len).sum();
            assert!(
                changed * 2 < layout.file_len() && changed * 8 > layout.file_len(),
                "step {step}: {changed}"
            );
        }
    }

    #[test]
    fn a_head_tells_its_step() {
        let layout = Layout::new(2 << 20);
        for content in [Content::Good { step: 1 }, Content::Good { step: 123_456 }, Content::Bad { step: 3 }]
        {
            let mut head = vec![0; layout.header_len() as usize];
            layout.fill(content, 0, &mut head);
            assert_eq!(layout.recognise(&head), Some(content));
            assert_eq!(Layout::new(5 << 20).recognise(&head), None, "another model's");
        }
        assert_eq!(layout.recognise(&vec![0; layout.header_len() as usize]), None);
    }

    #[test]
    fn sizes_are_about_what_was_asked_for() {
        for asked in [2 << 20, 100 << 20, 170_000_000_u64, 4 << 30] {
            let got = Layout::new(asked).file_len() as f64 / asked as f64;
            assert!(
                (0.4..1.7).contains(&got) && (asked < 50 << 20 || (0.85..1.15).contains(&got)),
                "{asked}: {got}"
            );
        }
    }
}
