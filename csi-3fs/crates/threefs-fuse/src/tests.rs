//! The daemon between a scripted kernel and a scripted metadata service.

mod fixture;
mod locks;
