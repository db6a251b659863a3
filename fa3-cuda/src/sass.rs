//! A kernel's main loop as the compiler made it, read from machine code: the analysis of Appendix B.2 of the paper
//! (arXiv 2407.08608).
//!
//! ```text
//! PTX -> ptxas -> cubin -> nvdisasm -c -> Listing -> product_loops -> Products and what runs under them, Order
//! ```
//!
//! A kernel orders the starts of its products and the waits for them. The compiler chooses the order of the
//! instructions in between: it may move the softmax behind the wait, so that the products do not hide it, or wait after
//! every instruction. This module starts no process.
//!
//! ```
//! use fa3_cuda::sass::{Class, Listing, product_loops};
//!
//! let listing = Listing::parse(
//!     "
//! .L_x_0:
//!         /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;
//!         /*0010*/                   MUFU.EX2 R2, R2 ;
//!         /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
//!         /*0030*/                   MUFU.EX2 R3, R24 ;
//!         /*0040*/              @!P0 BRA `(.L_x_0) ;
//!         /*0050*/                   EXIT ;",
//! )?;
//! let [round] = &product_loops(&listing)[..] else { panic!("one loop") };
//! assert_eq!(round.order().to_string(), "HGMMA MUFU.EX2 DEPBAR(0) MUFU.EX2");
//! let [product] = &round.products()[..] else { panic!("one product") };
//! assert_eq!((round.count(Class::Exp), round.under(product, Class::Exp)), (2, 1));
//! # Ok::<(), fa3_cuda::sass::ListingError>(())
//! ```

mod listing;

mod class;

mod flow;

mod round;

mod product;

mod order;

pub use class::Class;
pub use flow::product_loops;
pub use listing::{Instruction, Listing, ListingError};
pub use order::{Order, Step};
pub use product::Product;
pub use round::Round;
