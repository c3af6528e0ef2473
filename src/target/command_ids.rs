//! Which command identifiers are outstanding on a queue: hosts must not use one twice (Base 2.0, 3.3.3.1).
#![forbid(unsafe_code)]

/// One bit for each of the 65536 identifiers.
pub struct CommandIds {
    words: Box<[u64; 1024]>,
    count: usize,
}

impl Default for CommandIds {
    fn default() -> CommandIds {
        CommandIds { words: Box::new([0; 1024]), count: 0 }
    }
}

impl CommandIds {
    /// False if `cid` is outstanding already.
    pub fn insert(&mut self, cid: u16) -> bool {
        let (word, bit) = place(cid);
        if self.words[word] & bit != 0 {
            return false;
        }
        self.words[word] |= bit;
        self.count += 1;
        true
    }

    pub fn remove(&mut self, cid: u16) {
        let (word, bit) = place(cid);
        if self.words[word] & bit != 0 {
            self.words[word] &= !bit;
            self.count -= 1;
        }
    }

    /// How many are outstanding.
    pub fn len(&self) -> usize {
        self.count
    }
}

/// The word and the bit in it that stand for `cid`.
fn place(cid: u16) -> (usize, u64) {
    (usize::from(cid >> 6), 1 << (cid & 63))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_identifier_is_its_own() {
        let mut ids = CommandIds::default();
        for cid in [0, 1, 63, 64, 0x7FFF, 0xFFFF] {
            assert!(ids.insert(cid));
            assert!(!ids.insert(cid), "{cid:#x} is outstanding");
        }
        assert_eq!(ids.len(), 6);
        ids.remove(63);
        ids.remove(63);
        assert_eq!(ids.len(), 5);
        assert!(ids.insert(63) && !ids.insert(64));
    }
}
