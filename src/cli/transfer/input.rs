//! Where a stream comes from: standard input or a file, decoded on a thread of its own.
#![forbid(unsafe_code)]

use super::widen;
use crate::cli::Failure;
use crate::stream::{Decoder, Event, StreamError};
use crossbeam_channel::{Receiver, Sender};
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read};
use std::os::fd::AsFd;
use std::path::Path;

/// A stream to be read.
pub struct Input {
    file: File,
    /// Bytes, where that can be known.
    length: Option<u64>,
}

/// Why a stream is not read to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReadFault {
    /// The system's reason.
    #[error("the stream cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It is not what was sent.
    #[error("the stream is refused: {0}")]
    Stream(#[from] StreamError),
}

impl Input {
    /// A file, or standard input, unless that is a terminal.
    pub fn open(path: Option<&Path>) -> Result<Input, Failure> {
        let file = match path {
            Some(path) => File::open(path)
                .map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))?,
            None => {
                let stdin = io::stdin();
                if stdin.is_terminal() {
                    return Err(Failure::usage("a stream does not come from a terminal")
                        .hint("name a file with --file, or put `rimrock snapshot send … |` in front"));
                }
                let file = stdin.as_fd().try_clone_to_owned().map(File::from);
                file.map_err(|error| Failure::failed(format!("cannot read: {error}")))?
            }
        };
        widen(&file);
        let length = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|found| found.len());
        Ok(Input { file, length })
    }

    /// Bytes of the stream, where that is known before it is read.
    pub fn length(&self) -> Option<u64> {
        self.length
    }

    /// Decodes the whole stream into `events`, whose last is its end or what is wrong with it. Breaks off when nobody
    /// takes them. `spare` gives back buffers that are used no more.
    pub fn decode(&self, events: &Sender<Result<Event, ReadFault>>, spare: &Receiver<Vec<u8>>) {
        let mut decoder = Decoder::new();
        let mut last = None;
        loop {
            spare.try_iter().for_each(|buffer| decoder.recycle(buffer));
            let event = match self.step(&mut decoder) {
                Ok(Some(event)) => event,
                // The end record counts only when nothing follows it.
                Ok(None) => {
                    if let Some(last) = last {
                        drop(events.send(Ok(last)));
                    }
                    return;
                }
                Err(fault) => return drop(events.send(Err(fault))),
            };
            match event {
                Event::End(_) => last = Some(event),
                event => {
                    if events.send(Ok(event)).is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// What comes next; `None` at the end of a whole stream.
    fn step(&self, decoder: &mut Decoder) -> Result<Option<Event>, ReadFault> {
        if decoder.is_ended() {
            return match self.fill(&mut [0])? {
                0 => Ok(None),
                _ => Err(decoder.trailing().into()),
            };
        }
        loop {
            let count = self.fill(decoder.room())?;
            if count == 0 {
                decoder.finish()?;
                return Ok(None);
            }
            if let Some(event) = decoder.filled(count)? {
                return Ok(Some(event));
            }
        }
    }

    fn fill(&self, room: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.file).read(room) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }
}

impl From<ReadFault> for Failure {
    fn from(fault: ReadFault) -> Failure {
        let failure = Failure::failed(fault.to_string());
        match fault {
            ReadFault::Stream(_) => failure.hint("send it again; `--check FILE` examines a stream in a file"),
            ReadFault::Io(_) => failure,
        }
    }
}
