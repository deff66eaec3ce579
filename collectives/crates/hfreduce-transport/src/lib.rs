//! Transports of the collective engine: what carries bytes between ranks.
//!
//! - [`wire`]: the format of frames.
//! - [`connection`]: frames over one non-blocking socket.
//! - [`transport`]: the interface of a link's transport; [`tcp`] and [`in_process`] implement it;
//!   [`open`] creates one.
//! - [`message_socket`]: length-prefixed JSON messages over a socket.
//! - [`poller`]: epoll and doorbells.

pub mod connection;
pub mod in_process;
pub mod message_socket;
pub mod open;
pub mod poller;
pub mod tcp;
pub mod transport;
pub mod wire;
