//! The proof that a shard's metadata is whole, from a [`Picture`] of it.
//!
//! Every tree is walked once, beside the tree that it grew from: where both name the same block, the block and all below
//! are the older one's and were seen there; everything else must be the younger one's own by its birth. So each block has
//! one owner, which alone would free it; the walk costs what exists, not what exists times the snapshots that share it;
//! and along the way it counts what each node refers to and what it has written.
//!
//! What is proved of a shard when nothing is found:
//! - every page, record block and bitmap fits its checksum in both copies;
//! - each block in use is named exactly once by an owner, and each block named is in use, in a region of this shard, and
//!   of the kind that the region is for;
//! - no block was born after its node was sealed, and no node names a block that its ancestors gave up;
//! - each node's counts of blocks referred to and written are what the walk found.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::rc::Rc;

use super::cache::Object;
use super::finding::{Finding, Findings, HOLDERS_MAX, Kind, Names, Severity, Tally};
use super::node::{NodeId, Root};
use super::picture::{Marked, Marks, Picture};
use super::pointer::{BLOCK_BYTES, Block, Epoch, FANOUT, LEVELS, Page, Pointer};
use super::recover::Known;
use super::root::RootRecord;
use super::shard::Shard;
use super::space::{RegionId, RegionKind, Space};
use crate::memory::DmaBuf;

/// Pages read side by side.
const READS_AT_ONCE: usize = 32;
/// Pages of other trees kept for comparison.
const PAGES_KEPT: usize = 4096;
/// Steps before others have their turn.
const STEPS_PER_TURN: u32 = 4;
/// Findings for which everyone who holds the damaged block is looked up.
const LOOKUPS_MAX: usize = 200;
/// The most runs of blocks that are listed one by one.
const RUNS_MAX: usize = 100;

/// Why a proof was not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// Writes wait for the blocks that it keeps from being used again.
    Pressed,
    /// The shard stopped or was closed.
    Gone,
}

/// A correction that brings what is counted in line with what the trees say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mend {
    /// In use, but nothing names it.
    Free(Block),
    /// Named, but not in use.
    Claim(Block),
    /// Blocks to add to what the node refers to, and to what it has written.
    Count(NodeId, i64, i64),
    /// All node records and bitmaps are to be written again.
    Rewrite,
}

/// A proof under way, or done.
pub struct Proof<'a> {
    shard: &'a Shard,
    names: &'a Names,
    heal: bool,
    data: bool,
    named: Marks,
    pages: HashMap<Block, Rc<Page>>,
    steps: u32,
    lost: Vec<(usize, Block, u32, u64)>,
    inherited: Vec<(NodeId, Pointer, u32, u64)>,
    /// What is wrong.
    pub findings: Findings,
    /// What would make the counts and bitmaps right.
    pub mends: Vec<Mend>,
    /// Whether every tree could be walked to its end.
    pub complete: bool,
    /// Whether all node records could be read.
    pub nodes_known: bool,
    /// What was looked at.
    pub tally: Tally,
}

/// A page of a node's own that is still to be visited.
struct Frame {
    /// 1: a leaf page.
    height: u32,
    /// Its place, in units of what a page of this height maps.
    index: u64,
    here: Pointer,
    /// What is at this place in the tree that the node grew from, and in the one before that.
    bases: [Pointer; 2],
}

/// What is known of the node whose tree is walked.
struct Line {
    node: NodeId,
    /// Leaves below this were taken apart already.
    from: u64,
    /// Below this leaf the node is compared with the second base.
    passed: u64,
    sealed: Epoch,
    referenced: i64,
    written: i64,
    exact: bool,
    /// It cannot be compared with what it grew from: by its birth alone a block is its own or an ancestor's.
    loose: bool,
}

/// The first leaf after what a pointer of this height leads to.
fn end_leaf(height: u32, index: u64) -> u64 {
    match height {
        0 => index / FANOUT as u64 + 1,
        height => (index + 1) << (8 * (height - 1)),
    }
}

impl<'a> Proof<'a> {
    /// Nothing is proved yet. With `heal`, a damaged copy is written again from the other one; with `data`, data blocks
    /// are read too.
    pub fn new(shard: &'a Shard, names: &'a Names, picture: &Picture, heal: bool, data: bool) -> Proof<'a> {
        Proof {
            shard,
            names,
            heal,
            data,
            named: Marks::new(shard.geometry, picture.regions.keys()),
            pages: HashMap::new(),
            steps: 0,
            lost: Vec::new(),
            inherited: Vec::new(),
            findings: Findings::default(),
            mends: Vec::new(),
            complete: true,
            nodes_known: true,
            tally: Tally::default(),
        }
    }

    /// Takes the picture of a commit, checking all records on the way.
    pub async fn photograph(
        shard: &'a Shard,
        names: &'a Names,
        root: RootRecord,
        known: &Known,
        heal: bool,
        data: bool,
    ) -> Result<(Proof<'a>, Picture), Broken> {
        let mut picture = Picture::blank(&shard.geometry, &known.regions);
        for (node, lineage) in &known.nodes {
            picture.nodes.set_lineage(*node, *lineage);
        }
        picture.nodes.set_reaping(root.reaping);
        (picture.nodes_root, picture.space_root, picture.epoch) = (root.nodes, root.space, root.epoch);
        let mut proof = Proof::new(shard, names, &picture, heal, data);
        proof.records(&mut picture, true).await?;
        Ok((proof, picture))
    }

    /// Walks both trees of records. With `fill`, their contents become the picture's.
    pub async fn records(&mut self, picture: &mut Picture, fill: bool) -> Result<(), Broken> {
        for (object, root) in [(Object::Nodes, picture.nodes_root), (Object::Space, picture.space_root)] {
            let mut stack = vec![(root, LEVELS, 0u64)];
            while let Some((pointer, height, index)) = stack.pop() {
                if pointer.is_hole() {
                    continue;
                }
                self.turn().await?;
                self.mark(picture, pointer, true, None, height, index);
                let Some(bytes) = self.copies(picture, pointer).await else {
                    self.lose_record(picture, object, pointer, height, index);
                    continue;
                };
                match (height, Page::parse(&bytes)) {
                    (0, _) => self.take_record(picture, object, index, &bytes, pointer, fill),
                    (_, Some(page)) => {
                        for (slot, below) in page.iter().enumerate() {
                            stack.push((below, height - 1, index * FANOUT as u64 + slot as u64));
                        }
                    }
                    (_, None) => self.lose_record(picture, object, pointer, height, index),
                }
            }
        }
        Ok(())
    }

    fn take_record(
        &mut self,
        picture: &mut Picture,
        object: Object,
        index: u64,
        bytes: &[u8],
        pointer: Pointer,
        fill: bool,
    ) {
        if !fill {
            return;
        }
        let index = index as u32;
        if object == Object::Nodes {
            if !picture.nodes.load(index, bytes) {
                self.lose_record(picture, object, pointer, 0, u64::from(index));
            }
            return;
        }
        let id = RegionId(index);
        let decoded = Space::decode(&self.shard.geometry, self.shard.index, id, bytes);
        match (picture.regions.get_mut(&id), decoded) {
            (Some(region), Ok(used)) => region.used = used,
            // A region that was given back between the commit and this look at the catalog.
            (None, Ok(used)) if used.iter().all(|word| *word == 0) => {}
            (None, _) => {
                let what =
                    format!("there is a bitmap of region {index}, which the catalog gives to somebody else");
                let finding = Finding::new(Severity::Contradiction, Kind::Region, what);
                self.found(self.place(finding.costs("whatever lies in that region"), pointer.block()));
            }
            (Some(_), Err(why)) => {
                let finding =
                    Finding::new(Severity::Contradiction, Kind::Bitmap, format!("region {index}: {why}"));
                self.lose_record(picture, object, pointer, 0, u64::from(index));
                self.found(self.place(finding, pointer.block()));
            }
        }
    }

    /// A block of a tree of records is lost, with all that it leads to.
    fn lose_record(
        &mut self,
        picture: &mut Picture,
        object: Object,
        pointer: Pointer,
        height: u32,
        index: u64,
    ) {
        let span = 1u64 << (8 * height);
        let first = index.saturating_mul(span);
        let shard = self.shard.index;
        let finding = if object == Object::Nodes {
            self.nodes_known = false;
            self.complete = false;
            let (low, high) = (first.saturating_mul(128), (first + span).saturating_mul(128));
            let held = picture.nodes.iter().filter(|id| (low..high).contains(&u64::from(id.0)));
            let names: Vec<String> = held.take(HOLDERS_MAX).map(|id| self.names.name(id)).collect();
            Finding::new(
                Severity::Lost,
                Kind::Nodes,
                format!(
                    "the records of nodes {low} to {} in shard {shard} are damaged in both copies",
                    high - 1
                ),
            )
            .costs(format!("what shard {shard} holds of {}", names.join(", ")))
        } else {
            for (id, region) in &mut picture.regions {
                if (first..first + span).contains(&u64::from(id.0)) {
                    region.known = false;
                }
            }
            let what = format!("bitmaps of shard {shard} from region {first} on are damaged in both copies");
            Finding::new(Severity::Contradiction, Kind::Bitmap, what).repairable()
        };
        self.found(self.place(finding, pointer.block()));
    }

    /// Walks all trees of nodes and compares what they name with what is in use.
    pub async fn walk(&mut self, picture: &mut Picture) -> Result<(), Broken> {
        let reaping = picture.nodes.reaping();
        let mut counts: HashMap<NodeId, Option<i64>> = HashMap::new();
        let mut owed: Option<(NodeId, i64)> = None;
        for (node, root) in picture.nodes.own_roots() {
            let Some(lineage) = picture.nodes.lineage(node) else {
                let what = format!(
                    "shard {} keeps a tree of node {}, which the catalog does not have",
                    self.shard.index, node.0
                );
                let finding = Finding::new(Severity::Contradiction, Kind::Nodes, what);
                self.found(finding.costs("what that tree alone holds, which nobody can reach"));
                self.complete = false;
                continue;
            };
            let base = picture.nodes.base(node);
            let beyond = base.and_then(|base| picture.nodes.base(base));
            let root_of = |of: Option<NodeId>| match of.map(|of| picture.nodes.slot(of).root) {
                Some(Root::Own(root)) => root,
                _ => Pointer::EMPTY,
            };
            let bases = [root_of(base), root_of(beyond)];
            let cursor = |of: Option<NodeId>| match reaping {
                Some(reaping) if !reaping.thinning && of == Some(reaping.node) => reaping.cursor,
                _ => 0,
            };
            // What a ghost inherited it no longer keeps, so nothing can be compared with its tree.
            let hollow = |of: NodeId| {
                picture.nodes.is_ghost(of) || reaping.is_some_and(|r| r.thinning && r.node == of)
            };
            let sealed = lineage.sealed.unwrap_or(picture.epoch).min(picture.epoch);
            let mut line = Line {
                node,
                from: cursor(Some(node)),
                passed: cursor(base),
                sealed,
                referenced: 0,
                written: 0,
                exact: !hollow(node),
                loose: [Some(node), base, beyond].into_iter().flatten().any(hollow),
            };
            let bases = if line.loose { [Pointer::EMPTY; 2] } else { bases };
            self.walk_node(picture, &mut line, root, bases).await?;
            // What the node shares with the one that it grew from was counted there.
            let shared = match base {
                None => Some(0),
                Some(_) if line.passed > 0 || line.loose => {
                    let all = self.count(picture, root, LEVELS).await?;
                    all.map(|all| all - line.referenced)
                }
                Some(base) => counts.get(&base).copied().flatten(),
            };
            let referenced = shared.filter(|_| line.exact).map(|shared| shared + line.referenced);
            counts.insert(node, referenced);
            if line.from > 0 || reaping.is_some_and(|r| !r.thinning && r.node == node) {
                // What it held of the part taken apart is its heir's, and will be counted there in the end.
                owed = Some((node, picture.nodes.slot(node).written as i64 - line.written));
                continue;
            }
            let owed = match owed {
                Some((reaped, owed)) if base == Some(reaped) => owed,
                _ => 0,
            };
            self.compare_counts(picture, &line, referenced, owed);
        }
        for (node, here, height, index) in std::mem::take(&mut self.inherited) {
            if !self.named.contains(here.block()) {
                let frame = Frame { height, index, here, bases: [Pointer::EMPTY; 2] };
                self.wrong_pointer(
                    node,
                    &frame,
                    Kind::Pointer,
                    "it is older than its node, and nobody has it any more",
                );
            }
        }
        self.compare_bitmaps(picture);
        self.name_holders(picture).await
    }

    fn compare_counts(&mut self, picture: &Picture, line: &Line, referenced: Option<i64>, owed: i64) {
        let slot = picture.nodes.slot(line.node);
        if !line.exact {
            return;
        }
        let wrong_by = (
            referenced.map_or(0, |referenced| referenced - slot.referenced as i64),
            line.written - owed - slot.written as i64,
        );
        if wrong_by == (0, 0) {
            return;
        }
        let (name, shard) = (self.names.name(line.node), self.shard.index);
        let what = format!(
            "{name} is counted in shard {shard} to refer to {} blocks and to have written {}; it refers to {} and has written {}",
            slot.referenced,
            slot.written,
            slot.referenced as i64 + wrong_by.0,
            slot.written as i64 + wrong_by.1,
        );
        let mut finding = Finding::new(Severity::Notice, Kind::Count, what).repairable();
        finding.extents = self.names.extents(line.node, shard, 0, 0);
        self.mends.push(Mend::Count(line.node, wrong_by.0, wrong_by.1));
        self.found(finding);
    }

    /// Visits every page and block that is `line.node`'s own.
    async fn walk_node(
        &mut self,
        picture: &mut Picture,
        line: &mut Line,
        root: Pointer,
        bases: [Pointer; 2],
    ) -> Result<(), Broken> {
        let mut stack = Vec::new();
        self.judge(picture, line, Frame { height: LEVELS, index: 0, here: root, bases }, &mut stack).await?;
        let mut ready: HashMap<Block, Option<Box<Page>>> = HashMap::new();
        while let Some(frame) = stack.pop() {
            self.turn().await?;
            if !ready.contains_key(&frame.here.block()) {
                ready.clear();
                let after = stack.iter().rev().filter(|other| other.height == frame.height);
                let wanted: Vec<Pointer> = std::iter::once(&frame)
                    .chain(after)
                    .take(READS_AT_ONCE)
                    .map(|frame| frame.here)
                    .collect();
                let pages = self.pages_checked(picture, &wanted).await;
                ready.extend(wanted.iter().map(|pointer| pointer.block()).zip(pages));
            }
            let Some(page) = ready.remove(&frame.here.block()).flatten() else {
                line.exact = false;
                self.lose_page(&frame, line);
                continue;
            };
            self.visit(picture, line, &frame, &page, &mut stack).await?;
        }
        Ok(())
    }

    async fn visit(
        &mut self,
        picture: &mut Picture,
        line: &mut Line,
        frame: &Frame,
        page: &Page,
        stack: &mut Vec<Frame>,
    ) -> Result<(), Broken> {
        let mut beside: [Option<Rc<Page>>; 2] = [None, None];
        let mut known = true;
        for (page, base) in beside.iter_mut().zip(frame.bases) {
            if !base.is_hole() && !base.same_block(frame.here) {
                *page = self.page(picture, base).await;
                known &= page.is_some();
            }
        }
        line.exact &= known;
        let mut data: Vec<(u64, Pointer)> = Vec::new();
        for (slot, here) in page.iter().enumerate() {
            let below = |at: usize| match (&beside[at], frame.bases[at]) {
                (Some(page), _) => page.get(slot),
                // The same page, under another owner: what it leads to is the same too.
                (None, base) if !base.is_hole() && base.same_block(frame.here) => here,
                _ => Pointer::EMPTY,
            };
            let (height, index) = (frame.height - 1, frame.index * FANOUT as u64 + slot as u64);
            let child = Frame { height, index, here, bases: [below(0), below(1)] };
            if !known && here.birth() <= picture.nodes.floor(line.node, end_leaf(height, index)) {
                // It cannot be compared; by its birth it is an ancestor's.
                continue;
            }
            let void = picture.nodes.void_below(line.node, end_leaf(height, index));
            if height == 0 && self.data && !here.is_hole() && here.birth() > void {
                let (passed, base) = self.base_of(line, &child);
                if !passed && !here.same_block(base) {
                    data.push((index, here));
                }
            }
            self.judge(picture, line, child, stack).await?;
        }
        if !data.is_empty() {
            self.read_data(line, &data).await;
        }
        Ok(())
    }

    /// Whether what is there was taken apart already, and what the node is compared with.
    fn base_of(&self, line: &Line, frame: &Frame) -> (bool, Pointer) {
        let end = end_leaf(frame.height, frame.index);
        (end <= line.from, frame.bases[usize::from(end <= line.passed)])
    }

    /// Says whose block a pointer names. One of the node's own is marked; a page of its own is to be visited.
    async fn judge(
        &mut self,
        picture: &mut Picture,
        line: &mut Line,
        frame: Frame,
        stack: &mut Vec<Frame>,
    ) -> Result<(), Broken> {
        let (done, base) = self.base_of(line, &frame);
        if done {
            return Ok(());
        }
        let here = frame.here;
        let floor = picture.nodes.floor(line.node, end_leaf(frame.height, frame.index));
        if here.is_hole() {
            if !base.is_hole() {
                match self.count(picture, base, frame.height).await? {
                    Some(count) => line.referenced -= count,
                    None => line.exact = false,
                }
                let since = floor < here.birth() && here.birth() <= line.sealed;
                if !line.loose && !since {
                    self.wrong_pointer(
                        line.node,
                        &frame,
                        Kind::Pointer,
                        "what its node grew from has a block there",
                    );
                }
            }
            return Ok(());
        }
        if here.same_block(base) {
            let stored = !picture.unstored.contains_key(&here.block());
            if here.birth() > floor || (stored && here != base) {
                self.wrong_pointer(line.node, &frame, Kind::Shared, "two nodes would each free it");
            }
            return Ok(());
        }
        if line.loose && here.birth() <= floor {
            let end = end_leaf(frame.height, frame.index);
            if here.birth() > picture.nodes.void_below(line.node, end) {
                self.inherited.push((line.node, here, frame.height, frame.index));
            }
            return Ok(());
        }
        if here.birth() <= floor {
            self.wrong_pointer(
                line.node,
                &frame,
                Kind::Pointer,
                "it is older than its node, whose ancestors do not have it",
            );
        } else if here.birth() > line.sealed {
            self.wrong_pointer(line.node, &frame, Kind::Pointer, "it is younger than its node");
        }
        if !self.mark(picture, here, frame.height > 0, Some(line.node), frame.height, frame.index) {
            line.exact = false;
            return Ok(());
        }
        if frame.height == 0 {
            line.referenced += 1 - i64::from(!base.is_hole());
            line.written += 1;
            self.tally.named += 1;
        } else {
            stack.push(frame);
        }
        Ok(())
    }

    /// Marks a block as named. False when it cannot be what it should be.
    fn mark(
        &mut self,
        picture: &Picture,
        pointer: Pointer,
        metadata: bool,
        node: Option<NodeId>,
        height: u32,
        index: u64,
    ) -> bool {
        let block = pointer.block();
        let kind = self.region_of(block).and_then(|id| picture.regions.get(&id)).map(|region| region.kind);
        let fits = match kind {
            Some(RegionKind::Data) => !metadata,
            Some(RegionKind::Metadata { .. }) => metadata,
            None => false,
        };
        let why = match (fits, self.named.mark(block)) {
            (true, Marked::New) => return true,
            (true, Marked::Again) => "it is named before, and each owner would free it",
            (false, Marked::Outside) => "it lies in no region of this shard",
            (false, _) | (true, Marked::Outside) => "it lies in a region that is for something else",
        };
        let whose = node.map_or_else(|| "the records".to_owned(), |node| self.names.name(node));
        let what = format!("{whose}, shard {}: names block {block:?}, but {why}", self.shard.index);
        let kind = if fits { Kind::Shared } else { Kind::Pointer };
        let mut finding = Finding::new(Severity::Contradiction, kind, what).costs("what that block leads to");
        if let Some(node) = node {
            finding.extents = self.extents_of(node, height, index);
        }
        self.complete = false;
        self.found(self.place(finding, block));
        false
    }

    fn wrong_pointer(&mut self, node: NodeId, frame: &Frame, kind: Kind, why: &str) {
        let block = frame.here.block();
        let named = if block == Block::HOLE { "a hole".to_owned() } else { format!("block {block:?}") };
        let what = format!(
            "{}, shard {}: {named} was born in epoch {}; {why}",
            self.names.name(node),
            self.shard.index,
            frame.here.birth()
        );
        let mut finding = Finding::new(Severity::Contradiction, kind, what).costs("what that block leads to");
        finding.extents = self.extents_of(node, frame.height, frame.index);
        self.found(if block == Block::HOLE { finding } else { self.place(finding, block) });
    }

    fn lose_page(&mut self, frame: &Frame, line: &Line) {
        self.complete = false;
        let what = format!(
            "a page of {}, shard {}, is damaged in both copies",
            self.names.name(line.node),
            self.shard.index
        );
        let mut finding = Finding::new(Severity::Lost, Kind::Page, what);
        finding.extents = self.extents_of(line.node, frame.height, frame.index);
        finding.cost = "what was written in these ranges would read as zeroes".to_owned();
        let block = frame.here.block();
        self.found_lost(self.place(finding, block), block, frame.height, frame.index);
    }

    async fn read_data(&mut self, line: &Line, data: &[(u64, Pointer)]) {
        let pointers: Vec<Pointer> = data.iter().map(|(_, pointer)| *pointer).collect();
        self.tally.data += pointers.len() as u64;
        for (at, why) in self.shard.bad_blocks(&pointers).await {
            let (index, pointer) = data[at];
            let what =
                format!("a data block of {}, shard {}, {why}", self.names.name(line.node), self.shard.index);
            let mut finding = Finding::new(Severity::Lost, Kind::Data, what);
            finding.extents = self.extents_of(line.node, 0, index);
            finding.cost = "these blocks would read as zeroes".to_owned();
            self.found_lost(self.place(finding, pointer.block()), pointer.block(), 0, index);
        }
    }

    fn found_lost(&mut self, finding: Finding, block: Block, height: u32, index: u64) {
        if self.lost.len() < LOOKUPS_MAX {
            self.lost.push((self.findings.list.len(), block, height, index));
        }
        self.found(finding);
    }

    fn extents_of(&self, node: NodeId, height: u32, index: u64) -> Vec<super::finding::Extent> {
        let count = 1u64 << (8 * height);
        self.names.extents(node, self.shard.index, index.saturating_mul(count), count)
    }

    /// Adds everyone else who holds what is lost.
    async fn name_holders(&mut self, picture: &mut Picture) -> Result<(), Broken> {
        for (at, block, height, index) in std::mem::take(&mut self.lost) {
            let mut extents = Vec::new();
            for node in holders(picture, block, height, index, self).await? {
                extents.extend(self.extents_of(node, height, index));
            }
            if let Some(finding) = self.findings.list.get_mut(at)
                && !extents.is_empty()
            {
                finding.extents = extents;
            }
        }
        Ok(())
    }

    fn compare_bitmaps(&mut self, picture: &Picture) {
        let geometry = self.shard.geometry;
        let (mut free, mut leaked) = (Vec::new(), Vec::new());
        for (id, region) in picture.regions.iter().filter(|(_, region)| region.known) {
            free.extend(Marks::runs(&geometry, *id, self.named.of(*id), &region.used));
            leaked.extend(Marks::runs(&geometry, *id, &region.used, self.named.of(*id)));
        }
        self.list_runs(&free, |runs| {
            let what = format!("{runs} named by a tree but free: the next write may overwrite them");
            Finding::new(Severity::Contradiction, Kind::Free, what)
                .costs("what is in these blocks, once they are written over")
                .repairable()
        });
        let complete = self.complete;
        self.list_runs(&leaked, |runs| {
            let finding =
                Finding::new(Severity::Notice, Kind::Leak, format!("{runs} in use, but no tree names them"));
            match complete {
                true => finding.repairable(),
                // They may belong to what could not be read.
                false => finding.costs("perhaps what could not be read leads there"),
            }
        });
        let blocks = |runs: Vec<(Block, u64)>| {
            runs.into_iter().flat_map(|(first, count)| (0..count).map(move |i| first.add(i)))
        };
        self.mends.extend(blocks(free).map(Mend::Claim));
        if complete {
            self.mends.extend(blocks(leaked).map(Mend::Free));
        }
    }

    fn list_runs(&mut self, runs: &[(Block, u64)], make: impl Fn(String) -> Finding) {
        let shard = self.shard.index;
        for (first, count) in runs.iter().take(RUNS_MAX) {
            let finding = make(format!("shard {shard}: {count} blocks from {first:?} on are"));
            let mut finding = self.place(finding, *first);
            if let Some(place) = &mut finding.place {
                place.length = count * BLOCK_BYTES as u64;
            }
            self.found(finding);
        }
        if let Some(rest) = runs.get(RUNS_MAX..).filter(|rest| !rest.is_empty()) {
            let count: u64 = rest.iter().map(|(_, count)| count).sum();
            self.found(make(format!("shard {shard}: {count} blocks in {} more places are", rest.len())));
        }
    }

    fn region_of(&self, block: Block) -> Option<RegionId> {
        let (index, _) = self.shard.geometry.region_of(block)?;
        Some(RegionId::new(u8::try_from(block.vdev()).ok()?, index))
    }

    fn place(&self, finding: Finding, block: Block) -> Finding {
        let uri =
            self.shard.devices.get(block.vdev()).map_or("a device that is not there", |d| &d.info().uri);
        finding.at(uri, block.offset(), BLOCK_BYTES as u64)
    }

    fn found(&mut self, finding: Finding) {
        self.findings.push(finding.of_shard(self.shard.index));
    }

    /// Lets others run, and ends the proof when writes wait for it.
    async fn turn(&mut self) -> Result<(), Broken> {
        self.steps += 1;
        if self.steps.is_multiple_of(STEPS_PER_TURN) {
            crate::reactor::yield_now().await;
        }
        if self.shard.is_pressed() {
            return Err(Broken::Pressed);
        }
        self.shard.check().map_err(|_| Broken::Gone)
    }

    /// Data blocks that a tree names; `None` when part of it cannot be read.
    async fn count(&mut self, picture: &Picture, root: Pointer, height: u32) -> Result<Option<i64>, Broken> {
        let mut count = 0;
        let mut stack = vec![(root, height)];
        while let Some((pointer, height)) = stack.pop() {
            if pointer.is_hole() {
                continue;
            }
            if height == 0 {
                count += 1;
                continue;
            }
            self.turn().await?;
            let Some(page) = self.page(picture, pointer).await else { return Ok(None) };
            match height {
                1 => count += page.iter().filter(|pointer| !pointer.is_hole()).count() as i64,
                height => stack.extend(page.iter().map(|below| (below, height - 1))),
            }
        }
        Ok(Some(count))
    }

    /// A page of any tree, to compare with: from memory or from a copy that is whole.
    async fn page(&mut self, picture: &Picture, pointer: Pointer) -> Option<Rc<Page>> {
        if let Some(page) = picture.unstored.get(&pointer.block()) {
            return Some(Rc::new(Page::clone(page)));
        }
        if let Some(page) = self.pages.get(&pointer.block()) {
            return Some(Rc::clone(page));
        }
        let copies = self.copies_of(picture, pointer.block());
        for block in copies.into_iter().flatten() {
            let Ok(device) = self.shard.device(block) else { continue };
            let (result, bytes) = device.read(block.offset(), DmaBuf::uninit(BLOCK_BYTES)).await;
            self.tally.metadata += 1;
            if result.is_ok() && crate::crc32c::crc32c(&bytes) == pointer.crc() {
                let page = Rc::<Page>::from(Page::parse(&bytes)?);
                if self.pages.len() >= PAGES_KEPT {
                    self.pages.clear();
                }
                self.pages.insert(pointer.block(), Rc::clone(&page));
                return Some(page);
            }
        }
        None
    }

    /// Pages read side by side, in both copies each.
    async fn pages_checked(&mut self, picture: &Picture, wanted: &[Pointer]) -> Vec<Option<Box<Page>>> {
        let mut reads = Vec::with_capacity(wanted.len());
        for pointer in wanted {
            let stored = !picture.unstored.contains_key(&pointer.block());
            reads.push(stored.then(|| (*pointer, self.copies_of(picture, pointer.block()))));
        }
        let shard = self.shard;
        let run = reads.iter().map(|read| async move {
            match read {
                Some((_, copies)) => shard.read_copies(*copies).await,
                None => Vec::new(),
            }
        });
        let answers = super::join::all(run).await;
        let mut pages = Vec::with_capacity(wanted.len());
        for ((pointer, read), bytes) in wanted.iter().zip(&reads).zip(answers) {
            pages.push(match read {
                Some((pointer, copies)) => {
                    let good = self.judge_copies(*pointer, *copies, bytes).await;
                    good.and_then(|bytes| Page::parse(&bytes))
                }
                None => picture.unstored.get(&pointer.block()).map(|page| Box::new(Page::clone(page))),
            });
        }
        pages
    }

    /// Both copies of a metadata block; the bytes of a good one.
    async fn copies(&mut self, picture: &Picture, pointer: Pointer) -> Option<DmaBuf> {
        let copies = self.copies_of(picture, pointer.block());
        let bytes = self.shard.read_copies(copies).await;
        self.judge_copies(pointer, copies, bytes).await
    }

    fn copies_of(&self, picture: &Picture, block: Block) -> [Option<Block>; 2] {
        let twin = || {
            let (_, offset) = self.shard.geometry.region_of(block)?;
            match picture.regions.get(&self.region_of(block)?)?.kind {
                RegionKind::Metadata { twin } => {
                    let first = self.shard.geometry.region(twin.index());
                    Some(Block::new(twin.vdev(), first + u64::from(offset)))
                }
                RegionKind::Data => None,
            }
        };
        [Some(block), twin()]
    }

    async fn judge_copies(
        &mut self,
        pointer: Pointer,
        copies: [Option<Block>; 2],
        bytes: Vec<Option<DmaBuf>>,
    ) -> Option<DmaBuf> {
        let fits = |bytes: &Option<DmaBuf>| {
            bytes.as_ref().is_some_and(|bytes| crate::crc32c::crc32c(bytes) == pointer.crc())
        };
        self.tally.metadata += bytes.len() as u64;
        let bad: Vec<Block> = copies
            .iter()
            .zip(&bytes)
            .filter(|(_, bytes)| !fits(bytes))
            .filter_map(|(block, _)| *block)
            .collect();
        let good = bytes.into_iter().find(fits).flatten().or_else(|| self.shard.page_in_memory(pointer));
        let good = good?;
        for block in bad {
            let copy = if Some(block) == copies[0] { "first" } else { "second" };
            let what =
                format!("the {copy} copy of a metadata block of shard {} is damaged", self.shard.index);
            let mut finding = self.place(Finding::copy(Kind::Metadata, what), block);
            if self.heal {
                finding.repaired = self.shard.rewrite(block, &good, pointer.crc()).await;
            }
            self.found(finding);
        }
        Some(good)
    }

    /// What is in use by the trees, for a shard whose bitmaps are lost. Only of a complete walk.
    pub fn named(&self) -> &Marks {
        &self.named
    }
}

/// The nodes in whose tree `block` is at that place.
async fn holders(
    picture: &mut Picture,
    block: Block,
    height: u32,
    index: u64,
    proof: &mut Proof<'_>,
) -> Result<Vec<NodeId>, Broken> {
    // In the tree of a ghost much is void, and nobody reads it.
    let nodes: Vec<NodeId> = picture.nodes.iter().filter(|node| !picture.nodes.is_ghost(*node)).collect();
    let mut answers: HashMap<Block, bool> = HashMap::new();
    let mut found = Vec::new();
    for node in nodes {
        let root = picture.nodes.root(node);
        let holds = match answers.get(&root.block()) {
            Some(holds) => *holds,
            None => {
                proof.turn().await?;
                let mut at = root;
                for level in (height..LEVELS).rev() {
                    let below = match at.is_hole() {
                        true => None,
                        false => proof.page(picture, at).await,
                    };
                    let slot = (index >> (8 * (level - height))) as usize % FANOUT;
                    at = below.map_or(Pointer::EMPTY, |page| page.get(slot));
                }
                let holds = at.block() == block;
                answers.insert(root.block(), holds);
                holds
            }
        };
        if holds {
            found.push(node);
            if found.len() == HOLDERS_MAX {
                break;
            }
        }
    }
    Ok(found)
}
