//! Cuts the byte stream of a control connection into JSON texts.
//!
//! Requests follow each other with or without white space between them, split anywhere (spdk's client sends no
//! newline, people's scripts send several objects in one write). The cutter looks only at brackets and string
//! quotes, each byte once, so a request that arrives byte by byte costs no more than one that arrives whole. It
//! never parses: what it hands out is bracket-balanced and may still be nonsense.
//!
//! After a `Broken` frame the position in the stream is lost for good and nothing more comes out; the owner
//! answers and closes.
#![forbid(unsafe_code)]

/// The longest request taken, in bytes. The largest real one (a list of devices) is a few kilobytes.
pub const REQUEST_BYTES_MAX: usize = 4 << 20;
/// The deepest nesting taken. Our deepest parameter is three levels under the batch; serde_json's own limit is 128.
pub const DEPTH_MAX: u32 = 64;

/// What came out of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A bracket-balanced text that begins with `{` or `[`.
    Text(Vec<u8>),
    /// The stream cannot be followed any further.
    Broken(FrameError),
}

/// Why the stream cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A byte outside any request that begins no JSON value.
    #[error("byte 0x{0:02x} begins no JSON value")]
    Garbage(u8),
    /// A string, number or literal where a request belongs.
    #[error("a request is an object, or an array of objects")]
    NotARequest,
    /// More than [`REQUEST_BYTES_MAX`].
    #[error("the request is longer than {REQUEST_BYTES_MAX} bytes")]
    TooLong,
    /// More than [`DEPTH_MAX`].
    #[error("the request is nested deeper than {DEPTH_MAX} levels")]
    TooDeep,
    /// `]` closes `{`, or the other way round.
    #[error("brackets do not match")]
    Mismatched,
    /// The peer closed its sending side inside a request.
    #[error("the connection ended inside a request")]
    Truncated,
}

/// The cutter of one connection.
#[derive(Debug, Default)]
pub struct Framer {
    buffer: Vec<u8>,
    /// Bytes of `buffer` already handed out.
    consumed: usize,
    /// Bytes of `buffer` already looked at.
    scanned: usize,
    /// One bit per open bracket, the innermost lowest: 1 for `[`, 0 for `{`.
    open: u64,
    depth: u32,
    in_string: bool,
    escaped: bool,
    broken: bool,
}

impl Framer {
    /// Takes bytes from the peer. Bytes after a broken frame are dropped.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.broken {
            return;
        }
        if self.consumed > 0 {
            self.buffer.drain(..self.consumed);
            self.scanned -= self.consumed;
            self.consumed = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next frame, or `None` until more bytes arrive.
    pub fn next_frame(&mut self) -> Option<Frame> {
        while !self.broken && self.scanned < self.buffer.len() {
            let byte = self.buffer[self.scanned];
            if self.depth == 0 && matches!(byte, b' ' | b'\t' | b'\r' | b'\n') {
                self.scanned += 1;
                self.consumed = self.scanned;
                continue;
            }
            if let Err(error) = self.step(byte) {
                return Some(self.give_up(error));
            }
            self.scanned += 1;
            if self.depth == 0 {
                let text = self.buffer[self.consumed..self.scanned].to_vec();
                self.consumed = self.scanned;
                return Some(Frame::Text(text));
            }
            if self.scanned - self.consumed > REQUEST_BYTES_MAX {
                return Some(self.give_up(FrameError::TooLong));
            }
        }
        None
    }

    /// The peer will send no more: what is left over is an error, nothing left over is a clean end.
    pub fn finish(&mut self) -> Option<Frame> {
        (!self.broken && self.depth > 0).then(|| self.give_up(FrameError::Truncated))
    }

    fn give_up(&mut self, error: FrameError) -> Frame {
        self.broken = true;
        self.buffer = Vec::new();
        (self.consumed, self.scanned) = (0, 0);
        Frame::Broken(error)
    }

    fn step(&mut self, byte: u8) -> Result<(), FrameError> {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return Ok(());
        }
        match byte {
            b'{' | b'[' => {
                if self.depth == DEPTH_MAX {
                    return Err(FrameError::TooDeep);
                }
                self.open = (self.open << 1) | u64::from(byte == b'[');
                self.depth += 1;
            }
            b'}' | b']' if self.depth > 0 => {
                if (self.open & 1 == 1) != (byte == b']') {
                    return Err(FrameError::Mismatched);
                }
                self.open >>= 1;
                self.depth -= 1;
            }
            b'"' if self.depth > 0 => self.in_string = true,
            _ if self.depth > 0 => {}
            b'"' | b'-' | b'0'..=b'9' => return Err(FrameError::NotARequest),
            b't' | b'f' | b'n' if self.at_literal() => return Err(FrameError::NotARequest),
            _ => return Err(FrameError::Garbage(byte)),
        }
        Ok(())
    }

    fn at_literal(&self) -> bool {
        let rest = &self.buffer[self.scanned..];
        [&b"true"[..], b"false", b"null"].iter().any(|literal| rest.starts_with(literal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(pieces: &[&[u8]]) -> Vec<Frame> {
        let mut framer = Framer::default();
        let mut frames = Vec::new();
        for piece in pieces {
            framer.push(piece);
            while let Some(frame) = framer.next_frame() {
                frames.push(frame);
            }
        }
        frames.extend(framer.finish());
        frames
    }

    fn text(bytes: &str) -> Frame {
        Frame::Text(bytes.as_bytes().to_vec())
    }

    #[test]
    fn texts_need_no_delimiter() {
        let expected = vec![text(r#"{"a":"}{"}"#), text("[{}]"), text("{}")];
        assert_eq!(cut(&[br#"{"a":"}{"}[{}]{}"#]), expected);
        assert_eq!(cut(&[b" \r\n\t{\"a\":\"}{\"}\n[{}]\n\n{}\n"]), expected);
    }

    #[test]
    fn any_split_gives_the_same_texts() {
        let stream = r#"{"n":12.5e3,"s":"\"\\\u00e9ü😀]"} {"b":[1,[2,{"c":null}]]}[{},{}]"#.as_bytes();
        let whole = cut(&[stream]);
        assert_eq!(whole.len(), 3);
        let single: Vec<&[u8]> = stream.chunks(1).collect();
        assert_eq!(cut(&single), whole);
        for at in 0..stream.len() {
            assert_eq!(cut(&[&stream[..at], &stream[at..]]), whole, "split at {at}");
        }
    }

    #[test]
    fn what_cannot_be_followed_is_named_once() {
        let deep = vec![b'['; DEPTH_MAX as usize + 1];
        let long = [&b"{\"a\":\""[..], &vec![b'x'; REQUEST_BYTES_MAX]].concat();
        for (bytes, error) in [
            (&b"hello {}"[..], FrameError::Garbage(b'h')),
            (b"trash", FrameError::Garbage(b't')),
            (b"\0{}", FrameError::Garbage(0)),
            (b"\xef\xbb\xbf{}", FrameError::Garbage(0xef)),
            (b",{}", FrameError::Garbage(b',')),
            (b"}", FrameError::Garbage(b'}')),
            (b"42 {}", FrameError::NotARequest),
            (b"\"text\"", FrameError::NotARequest),
            (b"null", FrameError::NotARequest),
            (b"{]", FrameError::Mismatched),
            (b"[{\"a\":[}]", FrameError::Mismatched),
            (b"{\"a\":1", FrameError::Truncated),
            (&deep, FrameError::TooDeep),
            (&long, FrameError::TooLong),
        ] {
            assert_eq!(cut(&[bytes]), vec![Frame::Broken(error)]);
        }
    }

    #[test]
    fn the_limits_themselves_are_allowed() {
        let depth = DEPTH_MAX as usize;
        let deep = [vec![b'['; depth], vec![b']'; depth]].concat();
        assert_eq!(cut(&[&deep]).len(), 1);
        assert!(matches!(cut(&[&deep])[0], Frame::Text(_)));
        let long = [&b"{\"a\":\""[..], &vec![b'x'; REQUEST_BYTES_MAX - 8], b"\"}"].concat();
        assert_eq!(long.len(), REQUEST_BYTES_MAX);
        assert!(matches!(cut(&[&long])[0], Frame::Text(_)));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_in_any_pieces_give_the_same_frames(
            bytes in proptest::collection::vec(
                proptest::sample::select(b"{}[]\"\\ \n,:01truefalsnx\xff\x00".to_vec()), 0..200),
            cuts in proptest::collection::vec(0_usize..200, 0..8),
        ) {
            let whole = cut(&[&bytes]);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            let split = cut(&pieces);
            // A literal is known as such only when all of it is there; both readings end the stream.
            proptest::prop_assert_eq!(split.len(), whole.len());
            for (one, other) in split.iter().zip(&whole) {
                let broken = |frame: &Frame| matches!(frame, Frame::Broken(_));
                proptest::prop_assert!(one == other || (broken(one) && broken(other)));
            }
            for frame in whole {
                if let Frame::Text(text) = frame {
                    // Whatever it is, reading it does not panic.
                    let _ = super::super::jsonrpc::read_message(&text);
                }
            }
        }
    }
}
