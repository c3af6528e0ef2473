//! Whether what is there after a power cut may be there.
//!
//! A *history* says what the host heard before each cut: text, one fact a line.
//!
//! ```text
//! run RUN                       what follows came in this run
//! flushed N0 N1 …               of each thread, the operations that a flush has made durable
//! through THREAD NUMBER         this operation was durable when it returned
//! kept THREAD NUMBER BLOCK      found after the cut: a block as a later operation made it, which nothing made durable
//! ```
//!
//! A block may hold what its last durable operation made of it, or what any later one of the same run did; nothing
//! older, and no mixture. A snapshot holds, of each thread, all operations up to some one, that one perhaps in part, and
//! nothing after: a thread begins an operation when the last one has returned.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use crate::plan::{BLOCKS, Content, Kind, Operation, Stamp, THREADS, operation};

/// How many operations of a thread can have begun that the host had not heard of when the power went.
const UNHEARD: u64 = 3000;

/// What is known to be durable, and what happened in the last run.
pub struct History {
    seed: u64,
    run: u32,
    /// Of each thread, what each of its blocks holds if nothing came after what is durable.
    durable: Vec<Vec<Content>>,
    /// Of each thread, the durable operations of the last run: all below a number, and some above.
    flushed: Vec<u64>,
    through: Vec<BTreeSet<u64>>,
}

impl History {
    pub fn parse(seed: u64, text: &str) -> Result<History, String> {
        let mut history = History {
            seed,
            run: 0,
            durable: vec![vec![Content::Zeroes; BLOCKS as usize]; THREADS.len()],
            flushed: vec![0; THREADS.len()],
            through: vec![BTreeSet::new(); THREADS.len()],
        };
        for line in text.lines() {
            let bad = || format!("the history has a line {line:?}");
            let mut words = line.split_whitespace();
            let kind = words.next().ok_or_else(bad)?;
            let numbers = words.map(|word| word.parse().map_err(|_| bad()));
            let numbers = numbers.collect::<Result<Vec<u64>, String>>()?;
            match (kind, numbers.as_slice()) {
                ("run", [run]) => {
                    history.end_run();
                    history.run = *run as u32;
                }
                ("flushed", counts) if counts.len() == THREADS.len() => {
                    for (flushed, count) in history.flushed.iter_mut().zip(counts) {
                        *flushed = (*flushed).max(*count);
                    }
                }
                ("through", [thread, number]) => {
                    history.through.get_mut(*thread as usize).ok_or_else(bad)?.insert(*number);
                }
                ("kept", [thread, number, block]) => history.keep(*thread as u32, *number, *block),
                _ => return Err(bad()),
            }
        }
        Ok(history)
    }

    fn stamp(&self, thread: u32, number: u64) -> Stamp {
        Stamp { run: self.run, thread, number }
    }

    fn operation(&self, thread: u32, number: u64) -> Operation {
        operation(self.seed, self.stamp(thread, number))
    }

    fn made(&self, kind: Kind, thread: u32, number: u64) -> Content {
        match kind {
            Kind::Zero => Content::Zeroes,
            Kind::Write | Kind::WriteThrough => Content::Written(self.stamp(thread, number)),
        }
    }

    /// What was found after a run is durable in the next. `kept` lines of a run come last in it.
    fn keep(&mut self, thread: u32, number: u64, block: u64) {
        self.end_run();
        let kind = self.operation(thread, number).kind;
        self.durable[thread as usize][block as usize] = self.made(kind, thread, number);
    }

    /// Applies the durable operations of the run to its blocks, once.
    fn end_run(&mut self) {
        for thread in 0..THREADS.len() {
            let flushed = std::mem::take(&mut self.flushed[thread]);
            let through = std::mem::take(&mut self.through[thread]);
            for number in (0..flushed).chain(through.into_iter().filter(|number| *number >= flushed)) {
                let Operation { kind, first, count, .. } = self.operation(thread as u32, number);
                let content = self.made(kind, thread as u32, number);
                self.durable[thread][first as usize..(first + count) as usize].fill(content);
            }
        }
    }

    /// Checks a thread's blocks after the last run. Gives the `kept` facts, or what is wrong.
    pub fn check(&self, thread: u32, found: &[Content]) -> Result<Vec<String>, String> {
        let at = thread as usize;
        let (flushed, through) = (self.flushed[at], &self.through[at]);
        // Of each block: what it must hold at least, and by which operation of this run, if it was one.
        let mut least: Vec<(Content, Option<u64>)> =
            self.durable[at].iter().map(|content| (*content, None)).collect();
        // Of each block: operations that may have reached it, and need not have.
        let mut later: Vec<Vec<u64>> = vec![Vec::new(); BLOCKS as usize];
        let last = through.last().map_or(flushed, |last| flushed.max(last + 1)) + UNHEARD;
        for number in 0..last {
            let Operation { kind, first, count, .. } = self.operation(thread, number);
            for block in first as usize..(first + count) as usize {
                if number < flushed || through.contains(&number) {
                    least[block] = (self.made(kind, thread, number), Some(number));
                    later[block].clear();
                } else {
                    later[block].push(number);
                }
            }
        }
        let mut kept = Vec::new();
        for (block, found) in found.iter().enumerate() {
            let (least, by) = least[block];
            if *found == least {
                continue;
            }
            let cause = later[block]
                .iter()
                .find(|number| self.made(self.operation(thread, **number).kind, thread, **number) == *found);
            match cause {
                Some(number) => kept.push(format!("kept {thread} {number} {block}")),
                None => {
                    return Err(format!(
                        "block {block} of thread {thread} holds {found:?}, but {least:?} was durable (operation {by:?} \
                         of run {})",
                        self.run
                    ));
                }
            }
        }
        Ok(kept)
    }

    /// Checks a thread's blocks in a snapshot that was taken in the last run: by then `done` operations had completed
    /// before it was asked for, and `begun` had begun when it was acknowledged.
    pub fn check_snapshot(
        &self,
        thread: u32,
        done: u64,
        begun: u64,
        found: &[Content],
    ) -> Result<(), String> {
        let mut expected = self.durable[thread as usize].clone();
        let apply = |expected: &mut [Content], number: u64| {
            let Operation { kind, first, count, .. } = self.operation(thread, number);
            let range = first as usize..(first + count) as usize;
            expected[range].fill(self.made(kind, thread, number));
        };
        for number in 0..done {
            apply(&mut expected, number);
        }
        let mut closest = (usize::MAX, String::new());
        for number in done..=begun {
            // All before `number`, and of it any part.
            let Operation { kind, first, count, .. } = self.operation(thread, number);
            let made = self.made(kind, thread, number);
            let partly = |block: usize| block as u64 >= first && (block as u64) < first + count;
            let wrong: Vec<usize> = (0..found.len())
                .filter(|&block| found[block] != expected[block])
                .filter(|&block| !(partly(block) && found[block] == made))
                .collect();
            let Some(block) = wrong.first() else { return Ok(()) };
            if wrong.len() < closest.0 {
                let text = format!("block {block} holds {:?}, not {:?}", found[*block], expected[*block]);
                closest = (wrong.len(), text);
            }
            apply(&mut expected, number);
        }
        Err(format!(
            "thread {thread} is in no state that it had between operations {done} and {begun} of run {}; the closest is \
             wrong in {} blocks: {}",
            self.run, closest.0, closest.1
        ))
    }
}
